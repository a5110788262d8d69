// The page: /v1/models says which models there are; what each takes says which of the views below tries it.

const STAGES = ["read", "wait", "parse", "model", "write"];
const AT_ONCE = 4; // requests that go together
const $ = (id) => document.getElementById(id);
let models = [], turn = 0;

/** An element with attributes (on... are listeners) and children, text or elements. */
function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") found.toggleAttribute(name, value);
    else found.setAttribute(name, value);
  }
  found.append(...children.filter((each) => each !== null));
  return found;
}

function say(fault) {
  $("fault").hidden = !fault;
  $("fault").textContent = fault ?? "";
}

/** Ask the server: {value, split: {stage: ms}, took: ms}. Throws an Error with its one line. */
async function ask(path, kind, body) {
  const headers = { accept: "application/json", timing: "1" };
  const key = sessionStorage.getItem("key");
  if (key) headers.authorization = `Bearer ${key}`;
  if (kind) headers["content-type"] = kind;
  const begin = performance.now();
  const answer = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body });
  const text = await answer.text();
  const took = performance.now() - begin;
  $("key").hidden = answer.status !== 401;
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error(`the server answered ${answer.status}`);
  }
  if (!answer.ok) throw new Error(value.error ?? `the server answered ${answer.status}`);
  const split = {};
  for (const part of (answer.headers.get("server-timing") ?? "").split(",")) {
    const [name, ms] = part.trim().split(";dur=");
    if (STAGES.includes(name)) split[name] = Number(ms);
  }
  return { value, split, took };
}

const run = (model, kind, body) => ask(`/v1/models/${encodeURIComponent(model.name)}:run`, kind, body);

/** Do the tasks, some at once; stops where another turn has begun. */
async function each(items, work) {
  const mine = turn;
  let next = 0;
  const worker = async () => {
    while (next < items.length && mine === turn) {
      const at = next++;
      await work(items[at], at, () => mine === turn);
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, items.length) }, worker));
}

// ------------------------------------------------------------------------------------------------- what all views show

/** The time split of some answers, summed: a bar and its key. */
function timed(answers) {
  const sums = STAGES.map((name) => answers.reduce((sum, each) => sum + (each.split[name] ?? 0), 0));
  const total = sums.reduce((one, other) => one + other, 0);
  const took = answers.reduce((most, each) => Math.max(most, each.took), 0);
  const bar = make("div", { class: "split", role: "img", "aria-label": "time split" });
  const keys = make("ul", { class: "keys" });
  STAGES.forEach((name, at) => {
    const part = make("i", { class: name });
    part.style.width = `${total ? (100 * sums[at]) / total : 0}%`;
    bar.append(part);
    keys.append(make("li", {}, make("i", { class: name }), `${name} ${sums[at].toFixed(2)} ms`));
  });
  keys.append(make("li", { class: "quiet" }, `${answers.length > 1 ? "slowest round trip" : "round trip"} ${took.toFixed(1)} ms`));
  return make("div", { class: "timing" }, bar, keys);
}

function bar(share) {
  const inner = make("i");
  inner.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return make("span", { class: "bar", "aria-hidden": "true" }, inner);
}

function table(names, rows) {
  const cell = (tag, value) =>
    make(tag, typeof value === "number" ? { class: "number" } : {}, value instanceof Node ? value : show(value));
  const head = make("tr", {}, ...names.map((name, at) =>
    make("th", { scope: "col", ...(typeof rows[0]?.[at] === "number" ? { class: "number" } : {}) }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map((value) => cell("td", value))));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    make("table", { class: "scores" }, make("thead", {}, head), make("tbody", {}, ...body)));
}

function show(value) {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : value.toFixed(4);
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** The same model in another precision, where the server has it open. */
function other(model) {
  const base = model.name.split("@")[0];
  return models.find((each) => each.name.split("@")[0] === base && each.precision !== model.precision);
}

function titled(model, ...children) {
  return make("div", {}, make("h2", {}, `${model.precision}, ${model.engine}`), ...children);
}

/** Show what `work` finds with the model, and beside it with its other precision where that is asked for. */
async function beside(model, work) {
  turn += 1;
  say(null);
  const second = document.querySelector("#both")?.checked ? other(model) : null;
  const places = [model, second].filter(Boolean).map((each) => [each, titled(each)]);
  $("found").replaceChildren(second ? make("div", { class: "two" }, ...places.map(([, place]) => place)) : places[0][1]);
  try {
    for (const [each, place] of places) await work(each, place);
  } catch (error) {
    say(error.message);
    $("found").replaceChildren();
  }
}

function both(model) {
  const second = other(model);
  if (!second) return null;
  return make("label", { class: "check" }, make("input", { type: "checkbox", id: "both" }), `${second.precision} beside ${model.precision}`);
}

/** A form whose button, or Ctrl+Enter in a text, submits it. */
function form(submit, button, ...children) {
  const found = make("form", { onsubmit: (event) => { event.preventDefault(); submit(); } },
    ...children, make("div", { class: "row" }, make("button", {}, button)));
  found.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); found.requestSubmit(); }
  });
  return found;
}

const lines = (text) => text.split("\n").map((each) => each.trim()).filter(Boolean);

// ------------------------------------------------------------------------------------------------------------- the views

/** Sentences, one a line; each is a request of its own, and shown as it comes. */
function sentences(model) {
  const text = make("textarea", { id: "text", spellcheck: "false" });
  text.value = model.example ?? "";
  let timer = 0;
  const submit = () => {
    const given = lines(text.value);
    if (!given.length) return say("type a sentence");
    beside(model, async (chosen, place) => {
      const list = make("ul", { class: "pairs" }), answers = [];
      const targets = given.map((sentence) => {
        const to = make("div", { class: "to" }, "…");
        list.append(make("li", {}, make("div", { class: "from" }, sentence), to));
        return to;
      });
      place.append(list);
      await each(given, async (sentence, at, current) => {
        const answer = await run(chosen, "application/json", JSON.stringify({ sentences: [sentence] }));
        if (!current()) return;
        answers.push(answer);
        const found = answer.value.results[0];
        targets[at].textContent = found.translation || found.error;
      });
      if (answers.length === given.length) place.append(timed(answers));
    });
  };
  text.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => text.value.trim() && submit(), 500); });
  return form(() => { clearTimeout(timer); submit(); }, "Translate",
    make("label", { for: "text" }, "Sentences, one a line"), text, both(model));
}

/** Photos, dropped, pasted or chosen. */
function photos(model) {
  let files = [];
  const input = make("input", { type: "file", id: "files", accept: "image/*", multiple: true, "aria-label": "Photos" });
  const submit = () => {
    if (!files.length) return say("choose a photo");
    beside(model, async (chosen, place) => {
      const answers = [];
      await each(files, async (file, at, current) => {
        const answer = await run(chosen, file.type || "application/octet-stream", file);
        if (!current()) return;
        answers.push(answer);
        const found = answer.value.results[0];
        const labels = [1, 2, 3, 4, 5].map((i) => [found[i > 1 ? `label${i}` : "label"], found[i > 1 ? `probability${i}` : "probability"]])
          .filter(([label]) => label !== undefined);
        const image = make("img", { alt: file.name, src: URL.createObjectURL(file) });
        image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
        place.append(make("div", { class: "photo" }, image,
          table(["label", "", "probability"], labels.map(([label, share]) => [String(label), bar(share), share]))));
      });
      if (answers.length) place.append(timed(answers));
    });
  };
  const take = (found) => {
    files = [...found].filter((file) => file.type.startsWith("image/"));
    if (files.length) submit(); else say("that is no image");
  };
  input.addEventListener("change", () => take(input.files));
  const drop = make("div", { class: "drop" }, make("label", { for: "files" }, "Drop photos here, paste one, or choose"), input);
  drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); drop.classList.remove("over"); take(event.dataTransfer.files); });
  const found = form(submit, "Label again", drop, both(model));
  found.addEventListener("paste", (event) => event.clipboardData.files.length && take(event.clipboardData.files));
  return found;
}

/** Rows of a log. */
function rows(model) {
  const text = make("textarea", { id: "rows", class: "rows", spellcheck: "false", wrap: "off" });
  text.value = model.example ?? "";
  const submit = () => {
    if (!text.value.trim()) return say("paste a row");
    const json = /^\s*[[{]/.test(text.value);
    const body = json ? text.value : text.value.replace(/\n*$/, "\n");
    beside(model, async (chosen, place) => {
      const answer = await run(chosen, json ? "application/json" : text.value.includes("\t") ? "text/tab-separated-values" : "text/csv", body);
      place.append(table(["row", "", "probability"],
        answer.value.results.map((each) => [String(each.row), bar(each.probability), each.probability])), timed([answer]));
    });
  };
  return form(submit, "Score", make("label", { for: "rows" }, "Rows: TSV or CSV as in a file, or JSON by column names"), text, both(model));
}

/** Texts, ranked by the cosine of their embeddings with that of what is asked. */
function search(model) {
  const query = make("input", { id: "query", type: "search", autocomplete: "off" });
  const text = make("textarea", { id: "text", spellcheck: "false" });
  text.value = model.example ?? "";
  const submit = () => {
    const given = lines(text.value), asked = query.value.trim();
    if (!asked || !given.length) return say("type what to search for, and texts to search in");
    beside(model, async (chosen, place) => {
      const answer = await run(chosen, "application/json", JSON.stringify({ texts: [asked, ...given] }));
      const [first, ...vectors] = answer.value.results.map((each) => each.embedding);
      const dot = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);
      const scored = vectors.map((each, at) => [given[at], dot(first, each) / Math.sqrt(dot(first, first) * dot(each, each) || 1)]);
      scored.sort((one, another) => another[1] - one[1]);
      place.append(table(["text", "", "cosine"], scored.map(([found, share]) => [found, bar(share), share])), timed([answer]));
    });
  };
  return form(submit, "Search", make("label", { for: "query" }, "Search for"), query,
    make("label", { for: "text" }, "In these texts, one a line"), text, both(model));
}

/** Texts, ranked by what the model says of each beside what is asked. */
function ranking(model) {
  const query = make("input", { id: "query", type: "search", autocomplete: "off" });
  const text = make("textarea", { id: "text", spellcheck: "false" });
  text.value = lines(model.example ?? "").map((each) => each.split("\t").pop()).join("\n");
  const submit = () => {
    const given = lines(text.value), asked = query.value.trim();
    if (!asked || !given.length) return say("type what to search for, and texts to rank");
    beside(model, async (chosen, place) => {
      const answer = await run(chosen, "application/json", JSON.stringify({ texts: given.map((each) => [asked, each]) }));
      const names = Object.keys(answer.value.results[0]).filter((name) => name !== "row");
      const rows = answer.value.results.map((each, at) => [given[at], ...names.map((name) => each[name])]);
      rows.sort((one, another) => another[1] - one[1]);
      place.append(table(["text", ...names], rows), timed([answer]));
    });
  };
  return form(submit, "Rank", make("label", { for: "query" }, "Search for"), query,
    make("label", { for: "text" }, "In these texts, one a line"), text, both(model));
}

/** Any other model: tensors by the Open Inference Protocol. */
function tensors(model) {
  const text = make("textarea", { id: "tensors", class: "rows", spellcheck: "false", wrap: "off" });
  const inputs = (model.inputs ?? []).map((each) => {
    const shape = each.shape.map((size) => (size > 0 ? size : 1));
    const count = Math.min(shape.reduce((one, size) => one * size, 1), 4096);
    return { name: each.name, datatype: each.datatype, shape, data: Array(count).fill(each.datatype === "BYTES" ? "" : 0) };
  });
  text.value = `{"inputs": [\n${inputs.map((each) => `  ${JSON.stringify(each)}`).join(",\n")}\n]}`;
  const submit = () => beside(model, async (chosen, place) => {
    const answer = await ask(`/v2/models/${encodeURIComponent(chosen.name)}/infer`, "application/json", text.value);
    const found = answer.value.outputs.map((each) => ({ ...each, data: each.data.length > 50 ? [...each.data.slice(0, 50), "…"] : each.data }));
    place.append(make("pre", { tabindex: "0" }, JSON.stringify(found, null, 1)), timed([answer]));
  });
  return form(submit, "Infer", make("label", { for: "tensors" }, "Tensors"), text, both(model));
}

function view(model) {
  const takes = model.run ?? [];
  if (!takes.length) return tensors(model);
  if (takes.includes("image/*")) return photos(model);
  if (model.task === "translation") return sentences(model);
  if (model.task === "embedding") return search(model);
  if (model.task === "ranking") return ranking(model);
  if (takes.includes("text/tab-separated-values")) return rows(model);
  return tensors(model);
}

// ------------------------------------------------------------------------------------------------------------- the page

function choose(name) {
  const model = models.find((each) => each.name === name) ?? models[0];
  turn += 1;
  $("model").value = model.name;
  $("about").textContent = `${model.description ?? ""} (${model.task}, ${model.precision}, ${model.engine})`;
  history.replaceState(null, "", `#${encodeURIComponent(model.name)}`);
  say(null);
  $("found").replaceChildren();
  $("work").replaceChildren(view(model));
}

const named = () => {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
};

async function open() {
  say(null);
  try {
    models = (await ask("/v1/models")).value.models;
  } catch (error) {
    return say(error.message);
  }
  models = models.filter((each) => each.task);
  if (!models.length) {
    say("the models are not open yet");
    setTimeout(open, 500);
    return;
  }
  $("model").replaceChildren(...models.map((each) => make("option", { value: each.name }, each.name)));
  choose(named());
}

$("model").addEventListener("change", () => choose($("model").value));
$("choice").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("secret").value);
  open();
});
window.addEventListener("hashchange", () => models.length && named() !== $("model").value && choose(named()));
open();
