-- Request: {write}. Aborts a begun put. A committed put stays. Replies also whether `collect` has something to do.
if not give_up(write) and lies_elsewhere(write) then condemn({write}) end
if leave_line(write) then wake_puts() end
return {'ok', SPREAD and has_trash() or 0}
