-- Tag filters, with the results of dataplane_core.spec.matches. A tag's value: "n" None, "t"/"u" bool, "i<digits>" int,
-- "I<rest>:<digits>" int whose double is off by <rest>, "f<8 bytes>" float, "s<utf-8>" str.
local function number_of(value)
  local kind = string.sub(value, 1, 1)
  if kind == 't' then return 1, 0 end
  if kind == 'u' then return 0, 0 end
  if kind == 'i' then return tonumber(string.sub(value, 2)), 0 end
  if kind == 'f' then return (struct.unpack('<d', string.sub(value, 2))), 0 end
  if kind == 'I' then
    local colon = string.find(value, ':', 1, true)
    return tonumber(string.sub(value, colon + 1)), tonumber(string.sub(value, 2, colon - 1))
  end
  return nil
end

local function bytes_less(a, b)
  local n = math.min(#a, #b)
  for i = 1, n do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- Returns equal, less, greater. The last two are nil if the values cannot be compared.
local function compare(a, b)
  local x, x_rest = number_of(a)
  local y, y_rest = number_of(b)
  if x and y then
    return x == y and x_rest == y_rest, x < y or (x == y and x_rest < y_rest), x > y or (x == y and x_rest > y_rest)
  end
  if string.sub(a, 1, 1) == 's' and string.sub(b, 1, 1) == 's' then
    local less = a ~= b and bytes_less(a, b)
    return a == b, less, a ~= b and not less
  end
  return a == b, nil, nil
end

local ANY = 'any '  -- before an operator: of a group, one sample that passes is enough

local function satisfies(value, symbol, operand)
  if string.sub(symbol, 1, #ANY) == ANY then symbol = string.sub(symbol, #ANY + 1) end
  if symbol == 'in' then
    for _, option in ipairs(operand) do
      if (compare(value, option)) then return true end
    end
    return false
  end
  local equal, less, greater = compare(value, operand)
  if symbol == '==' then return equal end
  if symbol == '!=' then return not equal end
  if symbol == '<' then return less end
  if symbol == '<=' then return less or (less ~= nil and equal) end
  if symbol == '>' then return greater end
  return greater or (greater ~= nil and equal)
end

-- `conditions`: a list of {name, symbol, operand}, or nil; `packed`: a row's tags, or false.
local function matches(packed, conditions)
  if not conditions or #conditions == 0 then return true end
  if not packed then return false end
  local tags = cmsgpack.unpack(packed)
  for _, condition in ipairs(conditions) do
    local value = tags[condition[1]]
    if not value or not satisfies(value, condition[2], condition[3]) then return false end
  end
  return true
end

-- Whether the samples of a group match. `all_packed`: the tags of each, or false.
local function group_matches(all_packed, conditions)
  for _, condition in ipairs(conditions) do
    local count = 0
    for _, packed in ipairs(all_packed) do
      if matches(packed, {condition}) then count = count + 1 end
    end
    if count < (string.sub(condition[2], 1, #ANY) == ANY and 1 or #all_packed) then return false end
  end
  return true
end
