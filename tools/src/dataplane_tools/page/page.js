"use strict";
// The page of `dataplane read --html`. Its data are two elements: `rows`, one JSON value, and `tokens`, a line for each
// sample, JSON that is packed until the sample is shown. All text becomes text nodes, never markup.

const at = (id) => document.getElementById(id);
const page = JSON.parse(at("rows").textContent);
const lines = at("tokens").textContent.split("\n");
const rows = page.rows; // the samples as `--json` has them, but their tokens
// A field that is called as one of the page's own columns shows as `text (field)`, a tag as `text (tag)`.
const named = (values, kind) =>
  Object.entries(values).map(([name, value]) => [["id", "text"].includes(name) ? `${name} (${kind})` : name, value]);
for (const row of rows) row.values = Object.fromEntries([...named(row.values, "field"), ...named(row.tags, "tag")]);
// What all samples have alike is shown with each, and is no column.
const differing = [...new Set(rows.flatMap((row) => Object.keys(row.values)))].filter(
  (name) => rows.length === 1 || new Set(rows.map((row) => row.values[name])).size > 1,
);
const place = new Map(rows.map((row, index) => [row.sample_id, index]));
const ROW = 26; // pixels, as in the styles
const MOST_WORDS = 4e6; // of one answer times those of another, for a comparison
const MORE = 6000; // characters of a text that are added at a time

let shown = rows.map((_, index) => index); // those that the search leaves, in order
let current = -1; // an index of `rows`
let order = { name: null, down: false };
let color = page.tokens.find((name) => name === "advantages") ?? page.tokens[0] ?? "";

// --- text -------------------------------------------------------------------------------------------------------------

// What would not show as it is, or change the direction of what follows, shows as an escape.
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]|\p{Surrogate}/gu;
const clean = (text) =>
  String(text).replace(HIDDEN, (found) => "\\u" + found.charCodeAt(0).toString(16).padStart(4, "0"));

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  made.append(...children.flat().map((child) => (child instanceof Node ? child : clean(child))));
  // after the children: each child that is added to an element with `dir` makes Chromium look at all of them
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  return made;
}

// A `pre` with parts of a text, strings and elements: the first ones, and more as soon as its end is near the view.
function long(parts) {
  const left = pieces(parts);
  const made = element("pre", {});
  const end = element("span", {});
  end.more = () => {
    const some = [];
    for (let count = 0; count < MORE; ) {
      const next = left.next();
      if (next.done) {
        end.remove();
        break;
      }
      some.push(next.value);
      count += (next.value.textContent ?? next.value).length;
    }
    if (end.parentNode) end.before(...some);
    else made.append(...some);
  };
  made.append(end);
  end.more();
  if (end.parentNode) ends.observe(end);
  made.dir = "auto";
  return made;
}

function* pieces(parts) {
  for (const part of parts) {
    if (part instanceof Node) {
      yield part;
      continue;
    }
    for (let from = 0, to = 0; from < part.length; from = to) {
      to = from + MORE;
      if (/[\ud800-\udbff]/.test(part[to - 1] ?? "")) to++; // half of a character
      yield clean(part.slice(from, to));
    }
  }
}

const ends = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      target.more();
      ends.unobserve(target); // it tells of changes only
      if (target.parentNode) ends.observe(target);
    }
  },
  { root: at("sample"), rootMargin: "99999999px 0px 1000px" }, // what is above the view, too
);

const text = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(+value.toPrecision(6)) : String(value));
const said = (row) => row.parts.map((part) => part.text).join("\n");
const title = (name, ...children) => [element("h3", {}, name), ...children];

// --- table ------------------------------------------------------------------------------------------------------------

const valueOf = (row, name) => (name === "id" ? row.sample_id : name === "text" ? said(row) : row.values[name]);
const isLast = (value) => value === undefined || value === null || value === "nan";

function compare(left, right) {
  if (isLast(left) || isLast(right)) return isLast(left) - isLast(right);
  const sign = order.down ? -1 : 1;
  if (typeof left === "string" && typeof right === "string") return sign * left.localeCompare(right, "en", { numeric: true });
  if (typeof left !== typeof right) return sign * ((typeof left === "string") - (typeof right === "string"));
  return sign * (left - right);
}

const columns = ["id", ...differing, "text"];
const grid = `grid-template-columns: 7em ${"6em ".repeat(columns.length)} minmax(16em, 1fr); ` +
  `min-width: ${24 + 6.6 * columns.length}em; width: 100%`;

function arrange() {
  const wanted = at("search").value.toLowerCase();
  shown = rows.map((_, index) => index);
  if (wanted) shown = shown.filter((index) => haystack(rows[index]).includes(wanted));
  if (order.name !== null) {
    const keys = rows.map((row) => valueOf(row, order.name));
    shown.sort((left, right) => compare(keys[left], keys[right]));
  }
  at("count").textContent = `${shown.length} of ${rows.length}`;
  drawHead();
  draw();
}

function haystack(row) {
  row.haystack ??= [row.sample_id, ...Object.entries(row.values).flat(), said(row)].join("\n").toLowerCase();
  return row.haystack;
}

function drawHead() {
  at("head").replaceChildren(
    ...columns.map((name) => {
      const mark = order.name !== name ? "" : order.down ? " ▼" : " ▲";
      return element("span", { onclick: () => sortBy(name), "data-name": name }, name + mark);
    }),
  );
}

function sortBy(name) {
  order = { name, down: order.name === name && !order.down };
  arrange();
}

// Only what is in view is in the document.
function draw() {
  const table = at("table");
  const first = Math.max(0, Math.floor(table.scrollTop / ROW) - 4);
  const some = shown.slice(first, first + Math.ceil(table.clientHeight / ROW) + 8);
  at("space").style.height = `${shown.length * ROW}px`;
  at("space").replaceChildren(
    ...some.map((index, number) => {
      const row = rows[index];
      const cells = columns.map((name) => {
        const value = valueOf(row, name);
        const css = typeof value === "number" ? "number" : "";
        return element("span", { class: css, dir: "auto" }, value === undefined ? "" : text(value).slice(0, 300).replaceAll("\n", " "));
      });
      const style = `${grid}; top: ${(first + number) * ROW}px`;
      return element("div", { class: index === current ? "row on" : "row", style, onclick: () => select(index) }, cells);
    }),
  );
}

// --- a sample ---------------------------------------------------------------------------------------------------------

function select(index, { link = true } = {}) {
  current = index;
  const position = shown.indexOf(index);
  const table = at("table");
  if (position >= 0) {
    const top = position * ROW;
    const height = table.clientHeight - at("head").offsetHeight;
    if (top < table.scrollTop) table.scrollTop = top;
    if (top + ROW > table.scrollTop + height) table.scrollTop = top + ROW - height;
  }
  if (link) history.replaceState(null, "", "#" + encodeURIComponent(rows[index].sample_id));
  draw();
  drawSample();
}

async function unpacked(line) {
  const bytes = Uint8Array.from(atob(line), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function drawSample() {
  if (current < 0) return;
  const row = rows[current];
  const tokens = await unpacked(lines[current]);
  if (row !== rows[current]) return; // another was chosen meanwhile
  const numbers = tokens.per_token[color];
  const written = row.parts.some((part) => part.role !== "prompt" && part.stop > part.start);
  const isColored = (part) => numbers && part.stop > part.start && !(written && part.role === "prompt");
  const range = bounds(row.parts.filter(isColored).flatMap((part) => numbers.slice(part.start, part.stop)));
  const facts = Object.entries({ ...row.values, tokens: tokens.pieces.length });
  ends.disconnect();
  at("sample").replaceChildren(
    element("h2", {}, element("a", { href: "#" + encodeURIComponent(row.sample_id) }, row.sample_id)),
    element("div", { class: "facts" }, facts.map(([name, value]) => element("span", {}, `${name} `, element("b", {}, text(value))))),
    ...(row.lacks.length ? [element("p", { class: "lacks" }, `lacks: ${row.lacks.join(", ")}`)] : []),
    ...(numbers ? title(`${color}: ${range[0] > range[1] ? "no numbers" : range.map(text).join(" to ")}`) : []),
    ...row.parts.flatMap((part) => {
      const inside = isColored(part) ? colored(tokens, numbers, part, range) : [part.text];
      const further = part.calls === null ? [] : [element("pre", {}, JSON.stringify(part.calls, null, 2))];
      return element("div", { class: /^\w+$/.test(part.role) ? part.role : "" }, title(part.role), long(inside), further);
    }),
    ...Object.entries(row.images).flatMap(([name, image]) =>
      title(name, image.startsWith("data:") ? element("img", { src: image, alt: name }) : element("pre", {}, image)),
    ),
    ...Object.entries(row.objects).flatMap(([name, value]) => title(name, element("pre", {}, JSON.stringify(value, null, 2)))),
    ...Object.entries(row.shapes).flatMap(([name, value]) => title(name, element("pre", {}, value))),
    ...drawGroup(row),
  );
}

const bounds = (numbers) =>
  numbers
    .filter((value) => typeof value === "number")
    .reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

// Below zero red, above it green; the stronger, the nearer to the sample's largest.
function* colored(tokens, numbers, part, range) {
  const most = Math.max(...range.map(Math.abs)) || 1;
  for (let token = part.start; token < part.stop; token++) {
    const value = numbers[token];
    if (value === null) {
      yield element("span", {}, tokens.pieces[token]);
      continue;
    }
    const share = `rgba(var(${value < 0 ? "--down" : "--up"}), ${((0.6 * Math.abs(value)) / most).toFixed(3)})`;
    const style = typeof value === "number" ? `background: ${share}` : "outline: 1px dashed";
    yield element("span", { style, title: `${color} ${text(value)}`, "data-value": value }, tokens.pieces[token]);
  }
}

// --- a group ----------------------------------------------------------------------------------------------------------

const answerOf = (row) => {
  const parts = row.parts.filter((part) => part.role === "answer" || part.role === "assistant");
  return (parts.length ? parts : row.parts).map((part) => part.text).join("\n");
};
const wordsOf = (words) => words.match(/\s+|[\p{L}\p{N}_]+|./gsu) ?? [];

// For each word of `mine`, whether it is in a longest sequence that it has in common with `other`. Null: too long for that.
function common(mine, other) {
  let start = 0;
  let end = 0;
  while (start < Math.min(mine.length, other.length) && mine[start] === other[start]) start++;
  const rest = Math.min(mine.length, other.length) - start;
  while (end < rest && mine[mine.length - 1 - end] === other[other.length - 1 - end]) end++;
  const [height, width] = [mine.length - start - end, other.length - start - end];
  const same = mine.map((_, index) => index < start || index >= mine.length - end);
  if (height * width > MOST_WORDS) return null;
  const best = Array.from({ length: height + 1 }, () => new Uint16Array(width + 1));
  for (let i = height - 1; i >= 0; i--)
    for (let j = width - 1; j >= 0; j--)
      best[i][j] = mine[start + i] === other[start + j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  for (let i = 0, j = 0; i < height && j < width; ) {
    if (mine[start + i] === other[start + j]) [same[start + i], i, j] = [true, i + 1, j + 1];
    else if (best[i + 1][j] >= best[i][j + 1]) i++;
    else j++;
  }
  return same;
}

// Words, where those that are not `same` are marked: one mark for neighbors.
function* marked(words, same) {
  for (let from = 0, to = 0; from < words.length; from = to) {
    while (to < words.length && same[to] === same[from]) to++;
    const piece = words.slice(from, to).join("");
    yield same[from] ? piece : element("mark", {}, piece);
  }
}

const groupOf = (row) => (row.group ? rows.flatMap((each, index) => (each.group === row.group ? [index] : [])) : []);

function drawGroup(row) {
  const members = groupOf(row);
  if (members.length < 2) return [];
  const mine = wordsOf(answerOf(row));
  const differs = new Set(differing.filter((name) => members.some((index) => rows[index].values[name] !== row.values[name])));
  const answers = members.map((index) => {
    const words = wordsOf(answerOf(rows[index]));
    const same = index === current ? words.map(() => true) : common(words, mine);
    const inside = same === null ? [words.join("")] : marked(words, same);
    const facts = Object.entries(rows[index].values).filter(([name]) => differs.has(name));
    return element(
      "section",
      { class: index === current ? "on" : "", onclick: () => select(index), "data-id": rows[index].sample_id },
      title(rows[index].sample_id, element("div", { class: "facts" }, facts.map(([name, value]) => `${name} ${text(value)}`).join(", "))),
      same === null ? element("p", { class: "facts" }, "too long to be compared: nothing is marked") : [],
      long(inside),
    );
  });
  return title(`${row.group}: ${members.length} samples; marked is what ${row.sample_id} has not`, element("div", { class: "group" }, answers));
}

// --- keys and links ---------------------------------------------------------------------------------------------------

function step(among, by) {
  const next = among[Math.min(among.length - 1, Math.max(0, among.indexOf(current) + by))];
  if (next !== undefined) select(next);
}

function follow() {
  let id = location.hash.slice(1);
  try {
    id = decodeURIComponent(id);
  } catch {} // a link that is no link
  if (!place.has(id)) return;
  if (!shown.includes(place.get(id))) {
    at("search").value = "";
    arrange();
  }
  select(place.get(id), { link: false });
}

const keys = {
  j: () => step(shown, 1),
  k: () => step(shown, -1),
  ArrowDown: () => step(shown, 1),
  ArrowUp: () => step(shown, -1),
  l: () => step(current < 0 ? [] : groupOf(rows[current]), 1),
  h: () => step(current < 0 ? [] : groupOf(rows[current]), -1),
  c: () => {
    const select = at("color");
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    select.dispatchEvent(new Event("change"));
  },
  Enter: () => current >= 0 && document.body.classList.add("reading"),
  Escape: () => document.body.classList.remove("reading"),
  "/": () => at("search").select(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === at("search")) {
    if (event.key === "Escape") {
      at("search").value = "";
      arrange();
    }
    if (event.key === "Escape" || event.key === "Enter") at("search").blur();
    return;
  }
  if (!Object.hasOwn(keys, event.key)) return;
  event.preventDefault();
  keys[event.key]();
});

at("color").append(...["", ...page.tokens].map((name) => element("option", { value: name }, name || "no color")));
at("color").value = color;
at("color").addEventListener("change", (event) => {
  color = event.target.value;
  drawSample();
});
at("search").addEventListener("input", arrange);
at("table").addEventListener("scroll", draw);
addEventListener("resize", draw);
addEventListener("hashchange", follow);
at("head").style.cssText += grid;
arrange();
if (rows.length) select(0, { link: false });
follow();
