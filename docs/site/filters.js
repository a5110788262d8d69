// Filters: rows of the catalogue by task, licence, CPU and size; parts of the benchmarks by CPU. Without scripts everything is shown.
document.addEventListener("DOMContentLoaded", () => {
  const select = (label, options, changed) => {
    const field = document.createElement("label"), choice = document.createElement("select");
    for (const [value, text] of options) choice.add(new Option(text, value));
    choice.addEventListener("change", changed);
    field.append(`${label} `, choice);
    return { field, choice };
  };
  const bar = (fields, before) => {
    const filters = document.createElement("div");
    filters.className = "filters";
    filters.append(...fields);
    before.before(filters);
    return filters;
  };
  const same = (values) => [["", "all"], ...[...new Set(values)].sort().map((value) => [value, value])];

  const parts = [...document.querySelectorAll("[data-cpu]")];
  if (parts.length) {
    const show = () => {
      for (const part of parts) part.hidden = cpu.choice.value && part.dataset.cpu !== cpu.choice.value;
      try { localStorage.setItem("cpu", cpu.choice.value); } catch { /* no storage */ }
    };
    const cpu = select("CPU", same(parts.map((part) => part.dataset.cpu)), show);
    bar([cpu.field], document.querySelector("article h2"));
    let kept = "";
    try { kept = localStorage.getItem("cpu") || ""; } catch { /* no storage */ }
    if ([...cpu.choice.options].some((option) => option.value === kept)) cpu.choice.value = kept;
    show();
  }

  const table = document.querySelector(".catalogue table");
  if (!table) return;
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
  const rows = [...table.tBodies[0].rows], at = (name) => heads.indexOf(name);
  const text = (row, column) => row.cells[column].textContent.trim();
  const cpus = heads.filter((head) => /^\w+ \d+\/\d+$/.test(head));
  const megabytes = (row) => parseFloat(text(row, at("MB")).split("/").pop());
  const filter = () => {
    let shown = 0;
    for (const row of rows) {
      const size = megabytes(row);
      row.hidden = (task.choice.value && text(row, at("task")) !== task.choice.value)
        || (licence.choice.value && text(row, at("licence")) !== licence.choice.value)
        || (cpu.choice.value && !text(row, at(cpu.choice.value)))
        || (limit.choice.value && !(size <= parseFloat(limit.choice.value)));
      shown += !row.hidden;
    }
    for (const name of cpus) {
      const column = at(name), hide = Boolean(cpu.choice.value) && cpu.choice.value !== name;
      for (const row of table.rows) row.cells[column].hidden = hide;
    }
    count.textContent = `${shown} of ${rows.length} models`;
  };
  const task = select("Task", same(rows.map((row) => text(row, at("task")))), filter);
  const licence = select("Licence", same(rows.map((row) => text(row, at("licence")))), filter);
  const cpu = select("CPU", same(cpus), filter);
  const limit = select("Size, int8", [["", "any"], ...[5, 15, 30].map((size) => [size, `up to ${size} MB`])], filter);
  const count = document.createElement("output");
  bar([task.field, licence.field, cpu.field, limit.field, count], document.querySelector(".catalogue"));
  filter();
});
