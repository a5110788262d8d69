// Page to try the models: /v1/models lists them; their request types select one of the views below.

const STAGES = ["read", "wait", "parse", "model", "write"];
const MAX_PARALLEL = 4; // requests
const $ = (id) => document.getElementById(id);
let models = [];
let generation = 0; // increases with every run; older runs show no more results

/** Creates an element with attributes (on... are event listeners) and children, text or elements. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function showError(message) {
  $("error").hidden = !message;
  $("error").textContent = message ?? "";
}

/** Sends a request. Returns {value, stages: {name: ms}, latency: ms}; throws an Error with the server's message. */
async function request(path, contentType, body) {
  const headers = { accept: "application/json", timing: "1" };
  const key = sessionStorage.getItem("key");
  if (key) headers.authorization = `Bearer ${key}`;
  if (contentType) headers["content-type"] = contentType;
  const begin = performance.now();
  const response = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body });
  const text = await response.text();
  const latency = performance.now() - begin;
  $("key").hidden = response.status !== 401;
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error(`the server responded with status ${response.status}`);
  }
  if (!response.ok) throw new Error(value.error ?? `the server responded with status ${response.status}`);
  const stages = {};
  for (const part of (response.headers.get("server-timing") ?? "").split(",")) {
    const [name, ms] = part.trim().split(";dur=");
    if (STAGES.includes(name)) stages[name] = Number(ms);
  }
  return { value, stages, latency };
}

const run = (model, contentType, body) => request(`/v1/models/${encodeURIComponent(model.name)}:run`, contentType, body);

/** Calls `task(item, index, isCurrent)` for all items, MAX_PARALLEL at a time; stops when a newer run begins. */
async function runParallel(items, task) {
  const own = generation;
  let next = 0;
  const worker = async () => {
    while (next < items.length && own === generation) {
      const index = next++;
      await task(items[index], index, () => own === generation);
    }
  };
  await Promise.all(Array.from({ length: Math.min(MAX_PARALLEL, items.length) }, worker));
}

// ------------------------------------------------------------------------------------------------- parts of all views

/** Bar and legend of the time spent in each stage, summed over responses. */
function timing(responses) {
  const sums = STAGES.map((name) => responses.reduce((sum, response) => sum + (response.stages[name] ?? 0), 0));
  const total = sums.reduce((one, other) => one + other, 0);
  const latency = responses.reduce((max, response) => Math.max(max, response.latency), 0);
  const stageBar = make("div", { class: "split", role: "img", "aria-label": "time per stage" });
  const legend = make("ul", { class: "keys" });
  STAGES.forEach((name, i) => {
    const segment = make("i", { class: name });
    segment.style.width = `${total ? (100 * sums[i]) / total : 0}%`;
    stageBar.append(segment);
    legend.append(make("li", {}, make("i", { class: name }), `${name} ${sums[i].toFixed(2)} ms`));
  });
  legend.append(make("li", { class: "quiet" }, `${responses.length > 1 ? "slowest round trip" : "round trip"} ${latency.toFixed(1)} ms`));
  return make("div", { class: "timing" }, stageBar, legend);
}

function bar(share) {
  const inner = make("i");
  inner.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return make("span", { class: "bar", "aria-hidden": "true" }, inner);
}

function table(names, rows) {
  const cell = (tag, value) =>
    make(tag, typeof value === "number" ? { class: "number" } : {}, value instanceof Node ? value : format(value));
  const head = make("tr", {}, ...names.map((name, i) =>
    make("th", { scope: "col", ...(typeof rows[0]?.[i] === "number" ? { class: "number" } : {}) }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map((value) => cell("td", value))));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    make("table", { class: "scores" }, make("thead", {}, head), make("tbody", {}, ...body)));
}

function format(value) {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : value.toFixed(4);
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** The same model in another precision, if the server has it. */
function otherPrecision(model) {
  const base = model.name.split("@")[0];
  return models.find((other) => other.name.split("@")[0] === base && other.precision !== model.precision);
}

/** Shows the results of `task(model, section)`; with the checkbox, also those of the other precision next to them. */
async function showResults(model, task) {
  generation += 1;
  showError(null);
  const second = document.querySelector("#both")?.checked ? otherPrecision(model) : null;
  const columns = [model, second].filter(Boolean).map((shown) =>
    [shown, make("div", {}, make("h2", {}, `${shown.precision}, ${shown.engine}`))]);
  const sections = columns.map(([, section]) => section);
  $("results").replaceChildren(second ? make("div", { class: "two" }, ...sections) : sections[0]);
  try {
    for (const [shown, section] of columns) await task(shown, section);
  } catch (error) {
    showError(error.message);
    $("results").replaceChildren();
  }
}

/** Checkbox that compares two precisions; null without another precision. */
function comparison(model) {
  const second = otherPrecision(model);
  if (!second) return null;
  return make("label", { class: "check" }, make("input", { type: "checkbox", id: "both" }), `Compare ${model.precision} with ${second.precision}`);
}

/** A form that its button, or Ctrl+Enter in a text, submits. */
function form(submit, button, ...children) {
  const element = make("form", { onsubmit: (event) => { event.preventDefault(); submit(); } },
    ...children, make("div", { class: "row" }, make("button", {}, button)));
  element.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); element.requestSubmit(); }
  });
  return element;
}

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

// ------------------------------------------------------------------------------------------------------------- views

/** Translation: one request per line; translations are shown as they arrive. */
function translationView(model) {
  const text = make("textarea", { id: "text", spellcheck: "false" });
  text.value = model.example ?? "";
  let timer = 0;
  const submit = () => {
    const sentences = lines(text.value);
    if (!sentences.length) return showError("type a sentence");
    showResults(model, async (shown, section) => {
      const list = make("ul", { class: "pairs" }), responses = [];
      const targets = sentences.map((sentence) => {
        const target = make("div", { class: "to" }, "…");
        list.append(make("li", {}, make("div", { class: "from" }, sentence), target));
        return target;
      });
      section.append(list);
      await runParallel(sentences, async (sentence, i, isCurrent) => {
        const response = await run(shown, "application/json", JSON.stringify({ sentences: [sentence] }));
        if (!isCurrent()) return;
        responses.push(response);
        const result = response.value.results[0];
        targets[i].textContent = result.translation || result.error;
      });
      if (responses.length === sentences.length) section.append(timing(responses));
    });
  };
  text.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => text.value.trim() && submit(), 500); });
  return form(() => { clearTimeout(timer); submit(); }, "Translate",
    make("label", { for: "text" }, "Sentences, one per line"), text, comparison(model));
}

/** Image classification: images are dropped, pasted or chosen. */
function imageView(model) {
  let files = [];
  const input = make("input", { type: "file", id: "files", accept: "image/*", multiple: true, "aria-label": "Images" });
  const submit = () => {
    if (!files.length) return showError("choose an image");
    showResults(model, async (shown, section) => {
      const responses = [];
      await runParallel(files, async (file, i, isCurrent) => {
        const response = await run(shown, file.type || "application/octet-stream", file);
        if (!isCurrent()) return;
        responses.push(response);
        const result = response.value.results[0];
        const labels = [1, 2, 3, 4, 5].map((k) => [result[k > 1 ? `label${k}` : "label"], result[k > 1 ? `probability${k}` : "probability"]])
          .filter(([label]) => label !== undefined);
        const image = make("img", { alt: file.name, src: URL.createObjectURL(file) });
        image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
        section.append(make("div", { class: "photo" }, image,
          table(["label", "", "probability"], labels.map(([label, share]) => [String(label), bar(share), share]))));
      });
      if (responses.length) section.append(timing(responses));
    });
  };
  const select = (candidates) => {
    files = [...candidates].filter((file) => file.type.startsWith("image/"));
    if (files.length) submit(); else showError("that is no image");
  };
  input.addEventListener("change", () => select(input.files));
  const drop = make("div", { class: "drop" }, make("label", { for: "files" }, "Drop, paste or choose images"), input);
  drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); drop.classList.remove("over"); select(event.dataTransfer.files); });
  const element = form(submit, "Classify again", drop, comparison(model));
  element.addEventListener("paste", (event) => event.clipboardData.files.length && select(event.clipboardData.files));
  return element;
}

/** Recommendation: click probabilities of rows of a log. */
function rowView(model) {
  const text = make("textarea", { id: "rows", class: "rows", spellcheck: "false", wrap: "off" });
  text.value = model.example ?? "";
  const submit = () => {
    if (!text.value.trim()) return showError("paste a row");
    const isJson = /^\s*[[{]/.test(text.value);
    const body = isJson ? text.value : text.value.replace(/\n*$/, "\n");
    const contentType = isJson ? "application/json" : text.value.includes("\t") ? "text/tab-separated-values" : "text/csv";
    showResults(model, async (shown, section) => {
      const response = await run(shown, contentType, body);
      const results = response.value.results;
      const names = Object.keys(results[0] ?? {}).filter((name) => name.startsWith("probability"));
      const rows = results.map((row) => [String(row.row), ...names.flatMap((name) => [bar(row[name]), row[name]])]);
      section.append(table(["row", ...names.flatMap((name) => ["", name])], rows), timing([response]));
    });
  };
  return form(submit, "Score", make("label", { for: "rows" }, "Rows: TSV or CSV as in a file, or JSON by column names"), text, comparison(model));
}

/** A query and texts; rows of `rank(model, query, texts)`, {names, rows, response}, are sorted by their first number. */
function queryView(model, button, rank) {
  const query = make("input", { id: "query", type: "search", autocomplete: "off" });
  const text = make("textarea", { id: "text", spellcheck: "false" });
  text.value = lines(model.example ?? "").map((line) => line.split("\t").pop()).join("\n");
  const submit = () => {
    const texts = lines(text.value), question = query.value.trim();
    if (!question || !texts.length) return showError("type a query and texts");
    showResults(model, async (shown, section) => {
      const { names, rows, response } = await rank(shown, question, texts);
      const score = (row) => row.find((value) => typeof value === "number");
      rows.sort((one, other) => score(other) - score(one));
      section.append(table(["text", ...names], rows), timing([response]));
    });
  };
  return form(submit, button, make("label", { for: "query" }, "Query"), query,
    make("label", { for: "text" }, "Texts, one per line"), text, comparison(model));
}

/** Sentence encoders: texts by the cosine similarity of their embeddings with that of the query. */
function searchView(model) {
  return queryView(model, "Search", async (shown, query, texts) => {
    const response = await run(shown, "application/json", JSON.stringify({ texts: [query, ...texts] }));
    const [first, ...embeddings] = response.value.results.map((result) => result.embedding);
    const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
    const cosine = (a, b) => dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b) || 1);
    const rows = embeddings.map((embedding, i) => [texts[i], bar(cosine(first, embedding)), cosine(first, embedding)]);
    return { names: ["", "cosine"], rows, response };
  });
}

/** Cross-encoders: texts by the score of the pair with the query. */
function rankingView(model) {
  return queryView(model, "Rank", async (shown, query, texts) => {
    const response = await run(shown, "application/json", JSON.stringify({ texts: texts.map((text) => [query, text]) }));
    const names = Object.keys(response.value.results[0]).filter((name) => name !== "row");
    const rows = response.value.results.map((result, i) => [texts[i], ...names.map((name) => result[name])]);
    return { names, rows, response };
  });
}

/** Other models: tensors by the Open Inference Protocol. */
function tensorView(model) {
  const text = make("textarea", { id: "tensors", class: "rows", spellcheck: "false", wrap: "off" });
  const inputs = (model.inputs ?? []).map((input) => {
    const shape = input.shape.map((size) => (size > 0 ? size : 1));
    const count = Math.min(shape.reduce((product, size) => product * size, 1), 4096);
    return { name: input.name, datatype: input.datatype, shape, data: Array(count).fill(input.datatype === "BYTES" ? "" : 0) };
  });
  text.value = `{"inputs": [\n${inputs.map((input) => `  ${JSON.stringify(input)}`).join(",\n")}\n]}`;
  const submit = () => showResults(model, async (shown, section) => {
    const response = await request(`/v2/models/${encodeURIComponent(shown.name)}/infer`, "application/json", text.value);
    const outputs = response.value.outputs.map((output) => ({ ...output, data: output.data.length > 50 ? [...output.data.slice(0, 50), "…"] : output.data }));
    section.append(make("pre", { tabindex: "0" }, JSON.stringify(outputs, null, 1)), timing([response]));
  });
  return form(submit, "Infer", make("label", { for: "tensors" }, "Tensors"), text, comparison(model));
}

function viewOf(model) {
  const types = model.run ?? [];
  if (!types.length) return tensorView(model);
  if (types.includes("image/*")) return imageView(model);
  if (model.task === "translation") return translationView(model);
  if (model.task === "embedding") return searchView(model);
  if (model.task === "ranking") return rankingView(model);
  if (types.includes("text/tab-separated-values")) return rowView(model);
  return tensorView(model);
}

// -------------------------------------------------------------------------------------------------------------- page

function selectModel(name) {
  const model = models.find((candidate) => candidate.name === name) ?? models[0];
  generation += 1;
  $("model").value = model.name;
  $("about").textContent = `${model.description ?? ""} (${model.task}, ${model.precision}, ${model.engine})`;
  history.replaceState(null, "", `#${encodeURIComponent(model.name)}`);
  showError(null);
  $("results").replaceChildren();
  $("work").replaceChildren(viewOf(model));
}

const nameInUrl = () => {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
};

async function load() {
  showError(null);
  try {
    models = (await request("/v1/models")).value.models;
  } catch (error) {
    return showError(error.message);
  }
  models = models.filter((model) => model.task);
  if (!models.length) {
    showError("the models are not loaded yet");
    setTimeout(load, 500);
    return;
  }
  $("model").replaceChildren(...models.map((model) => make("option", { value: model.name }, model.name)));
  selectModel(nameInUrl());
}

$("model").addEventListener("change", () => selectModel($("model").value));
$("choice").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("secret").value);
  load();
});
window.addEventListener("hashchange", () => models.length && nameInUrl() !== $("model").value && selectModel(nameInUrl()));
load();
