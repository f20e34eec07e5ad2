// The page of `vit serve`: images to POST /predict, answers to cards. Every text of the server or of
// a file becomes textContent, never HTML. No library, no request to another host.
"use strict";

const $ = (id) => document.getElementById(id);
const MAX_CARDS = 100;
const AT_ONCE = 2;
const state = { models: [], token: sessionStorage.getItem("vit-token") || "", waiting: [], running: 0 };

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function sizeText(bytes) {
  return bytes < 1e6 ? `${Math.max(Math.round(bytes / 1e3), 1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function say(text) { $("live").textContent = text; }

async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (state.token) headers.authorization = `Bearer ${state.token}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", redirect: "error" });
  } catch {
    throw new Error("the server does not answer; is it still running?");
  }
  let content = null;
  try { content = await answer.json(); } catch { /* an answer that is no JSON has no sentence */ }
  if (answer.status === 401) showAccess();
  if (!answer.ok) {
    const error = new Error((content && content.error) || `the server answered ${answer.status}`);
    error.status = answer.status;
    error.retryAfter = Number(answer.headers.get("retry-after")) || 1;
    throw error;
  }
  return content;
}

// --- models and options ------------------------------------------------------------------------

async function loadModels() {
  try {
    const { models, limits } = await ask("models");
    state.models = models;
    $("limits").textContent = `up to ${limits.max_image_mb} MB and ${(limits.max_pixels / 1e6).toLocaleString("en")} megapixels each`;
  } catch (error) {
    $("about").textContent = error.message;
    return;
  }
  $("access").hidden = true;
  const chosen = $("model").value;
  $("model").replaceChildren(...state.models.map((one) => new Option(one.name, one.name)));
  if (state.models.some((one) => one.name === chosen)) $("model").value = chosen;
  $("model-option").hidden = state.models.length < 2;
  showModel();
}

function model() { return state.models.find((one) => one.name === $("model").value); }

function classCount(one) { return one.answers.length ? 0 : one.classes.length; }

function showModel() {
  const one = model();
  if (!one) return;
  const count = classCount(one);
  const kind = one.captions ? "writes captions"
    : one.answers.length ? one.answers.map((number) => number.name).join(", ")
    : `${count.toLocaleString("en")} ${count === 1 ? "class" : "classes"}${one.multilabel ? ", several an image" : ""}`;
  const scores = one.captions || !one.probabilities ? ""
    : one.calibrated ? " · scores are calibrated" : " · raw scores";
  $("about").textContent = `${one.name} · ${kind}${scores} · ${one.engine}, ${one.precision}, ${one.device}`;
  $("top-option").hidden = count === 0;
  $("reject-option").hidden = !one.rejects;
  $("sets-option").hidden = !one.sets || !count;
  showCode();
}

function query(one) {
  const options = new URLSearchParams();
  if (state.models.length > 1) options.set("model", one.name);
  if (classCount(one) && $("top").value) options.set("top_k", $("top").value);
  if (one.rejects && $("reject").checked) options.set("reject", "true");
  if (classCount(one) && one.sets && $("sets").checked) options.set("sets", "0.9");
  return options;
}

function showAccess() {
  $("access").hidden = false;
  $("token").focus();
}

function showCode() {
  const one = model();
  if (!one) return;
  const base = new URL("predict", document.baseURI);
  base.search = query(one).toString();
  const bearer = state.token ? " \\\n  -H 'Authorization: Bearer TOKEN'" : "";
  $("curl").textContent = `curl -F file=@image.jpg${bearer} \\\n  '${base.href}'`;
  const headers = state.token ? `, "Authorization": "Bearer TOKEN"` : "";
  $("python").textContent = [
    "import json",
    "import urllib.request",
    "",
    "image = open(\"image.jpg\", \"rb\").read()",
    "request = urllib.request.Request(",
    `    ${JSON.stringify(base.href)},`,
    "    data=image,",
    `    headers={"Content-Type": "image/jpeg"${headers}},`,
    ")",
    "with urllib.request.urlopen(request) as answer:",
    "    print(json.load(answer)[\"results\"][0])",
  ].join("\n");
}

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch { // not a secure context, or refused: the old way
    const area = make("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Select and copy it";
    area.remove();
  }
  say(button.textContent);
  setTimeout(() => { button.textContent = before; }, 1500);
}

// --- images ------------------------------------------------------------------------------------

async function addFiles(files) {
  const images = [...files]; // before the field is emptied
  if (!images.length) return;
  if (!model()) await loadModels(); // still on the way, or not answered before
  if (!model()) { say("the models are not loaded"); return; }
  const cards = images.map(makeCard);
  $("results").prepend(...cards.map((card) => card.element)); // the newest first, each lot in its order
  state.waiting.push(...cards);
  while ($("results").children.length > MAX_CARDS) dropCard($("results").lastElementChild);
  $("empty").hidden = true;
  $("clear").hidden = false;
  say(`${images.length} ${images.length === 1 ? "image" : "images"} sent`);
  work();
}

function makeCard(file) {
  const one = model();
  const element = $("card").content.firstElementChild.cloneNode(true);
  const card = { element, file, model: one, options: query(one), url: URL.createObjectURL(file), maps: null, gone: false };
  element.card = card;
  const name = file.name || "pasted image";
  element.querySelector(".name").textContent = name;
  const image = element.querySelector("img");
  image.alt = name;
  image.onerror = () => { image.hidden = true; element.querySelector(".no-preview").hidden = false; };
  image.onload = () => { if (card.map) drawMap(card, card.map); };
  image.src = card.url;
  element.querySelector(".meta").textContent = sizeText(file.size);
  element.querySelector(".bars").before(make("div", "busy"));
  element.querySelector(".explain").hidden = true;
  element.querySelector(".copy").hidden = true;
  element.querySelector(".remove").onclick = () => {
    dropCard(element);
    $("results-title").focus();
    if (!$("results").children.length) clearAll();
  };
  element.querySelector(".explain").onclick = () => explain(card);
  element.querySelector(".copy").onclick = (event) => copy(JSON.stringify(card.row, null, 2), event.currentTarget);
  return card;
}

function dropCard(element) {
  element.card.gone = true;
  URL.revokeObjectURL(element.card.url);
  element.remove();
}

function clearAll() {
  for (const element of [...$("results").children]) dropCard(element);
  state.waiting = [];
  $("empty").hidden = false;
  $("clear").hidden = true;
}

function work() {
  while (state.running < AT_ONCE && state.waiting.length) {
    const card = state.waiting.shift();
    if (card.gone) continue;
    state.running += 1;
    predict(card).finally(() => { state.running -= 1; work(); });
  }
}

async function send(card, options) {
  const form = new FormData();
  form.append("file", card.file, card.file.name || "pasted image");
  for (let attempt = 0; ; attempt += 1) {
    try {
      return await ask(`predict?${options}`, { method: "POST", body: form });
    } catch (error) {
      if (error.status !== 429 || attempt === 5 || card.gone) throw error;
      await new Promise((wake) => setTimeout(wake, 1000 * error.retryAfter));
    }
  }
}

async function predict(card) {
  const began = performance.now();
  try {
    const answer = await send(card, card.options);
    card.row = answer.results[0];
    const seconds = (performance.now() - began) / 1000;
    const which = state.models.length > 1 ? ` · ${card.model.name}` : "";
    card.element.querySelector(".meta").textContent = `${sizeText(card.file.size)} · ${seconds.toFixed(2)} s${which}`;
    showRow(card);
  } catch (error) {
    showNote(card, error.message, true);
  } finally {
    card.element.querySelector(".busy")?.remove();
  }
}

// --- answers -----------------------------------------------------------------------------------

function showNote(card, text, bad = false) {
  const note = card.element.querySelector(".note");
  note.textContent = text;
  note.classList.toggle("error", bad);
  note.hidden = false;
  say(`${card.file.name || "pasted image"}: ${text}`);
}

function scoreText(one, score) {
  if (!one.probabilities) return score.toPrecision(4);
  const percent = 100 * score;
  return percent > 0 && percent < 0.01 ? "< 0.01 %" : `${percent.toFixed(2)} %`;
}

function numberText(value) { return String(Number(value.toPrecision(5))); }

// A name and what is said of it, before a part of the bar that is filled.
function barOf(label, score, filled) {
  const bar = make("li");
  if (filled) {
    const fill = make("span", "fill");
    Object.assign(fill.style, filled);
    fill.setAttribute("aria-hidden", "true");
    bar.append(fill);
  }
  bar.append(make("span", "label", label), make("span", "score", score));
  return bar;
}

// A number, and its interval over the range of most training images.
function numberBar(row, { name, unit, range: [from, to] }) {
  const low = row[`${name}_low`];
  const high = row[`${name}_high`];
  const text = `${numberText(row[name])} ${unit}`.trim();
  if (low === undefined) return barOf(name, text);
  const percent = (value) => 100 * Math.min(Math.max((value - from) / (to - from), 0), 1);
  const interval = `${text} (${numberText(low)} to ${numberText(high)})`;
  return barOf(name, interval, { left: `${percent(low)}%`, right: `${100 - percent(high)}%` });
}

// The best class of a choice, and its probability.
function choiceBar(row, name) {
  const score = row[`${name}_score`];
  return barOf(name, `${row[name]} (${(100 * score).toFixed(1)}%)`, { transform: `scaleX(${score})` });
}

function showRow(card) {
  const { element, row } = card;
  if (row.error) { showNote(card, row.error, true); return; }
  if (row.caption !== undefined) {
    const caption = element.querySelector(".caption");
    caption.textContent = row.caption || "(an empty caption)";
    caption.hidden = false;
    caption.title = `log probability ${row.score.toFixed(3)}`;
  }
  const node = card.model.answers.length ? undefined : row.answer;
  if (node !== undefined) {
    const answer = element.querySelector(".caption");
    answer.textContent = node === null ? "unknown" : `${node} ${scoreText(card.model, row.answer_score)}`;
    answer.hidden = false;
  }
  const predictions = row.predictions || [];
  const largest = card.model.probabilities ? 1 : Math.max(...predictions.map((p) => Math.abs(p.score)), 1e-9);
  element.querySelector(".bars").replaceChildren(...predictions.map(({ label, score }) => {
    const share = Math.min(Math.max(score / largest, 0), 1);
    return barOf(label, scoreText(card.model, score), { transform: `scaleX(${share})` });
  }), ...card.model.answers.map((one) => one.classes ? choiceBar(row, one.name) : numberBar(row, one)));
  let note = "";
  if (row.unknown) note = `unknown: ${row.reason}`;
  else if (classCount(card.model) && !predictions.length) note = "no class is probable enough";
  if (row.set) note += `${note ? " · " : ""}one of: ${row.set.join(", ")}`;
  if (note) showNote(card, note);
  element.querySelector(".explain").hidden = !card.model.explains;
  element.querySelector(".copy").hidden = false;
  const [bar] = element.querySelectorAll(".bars li");
  const best = row.caption ?? node ?? (bar && [".label", ".score"].map((part) => bar.querySelector(part).textContent).join(", "));
  if (best) say(`${card.file.name || "pasted image"}: ${note || best}`);
}

// --- relevance maps ----------------------------------------------------------------------------

async function explain(card) {
  const button = card.element.querySelector(".explain");
  const group = card.element.querySelector(".maps");
  button.disabled = true;
  button.textContent = "Computing…";
  try {
    const options = new URLSearchParams({ explain: "image" });
    if (state.models.length > 1) options.set("model", card.model.name);
    const { explanations } = await send(card, options);
    const found = explanations[0];
    const maps = found.classes || found.words;
    const image = card.element.querySelector("img");
    if (image.hidden) { // a format that browsers do not show: what the network saw
      card.whole = true;
      image.src = found.seen.image;
      image.hidden = false;
      card.element.querySelector(".no-preview").hidden = true;
      await image.decode();
    }
    const choices = maps.map((map) => {
      const choice = make("button", "", map.label ?? map.text);
      choice.type = "button";
      choice.onclick = () => showMap(card, found.seen, map, choice);
      return choice;
    });
    const none = make("button", "", "image alone");
    none.type = "button";
    none.onclick = () => showMap(card, found.seen, null, none);
    group.replaceChildren(...choices, none);
    group.hidden = false;
    button.hidden = true;
    if (choices.length) { choices[0].click(); choices[0].focus(); }
    say("relevance maps are shown over the image");
  } catch (error) {
    showNote(card, error.message, true);
    button.disabled = false;
    button.textContent = "Why?";
  }
}

function showMap(card, seen, map, button) {
  for (const other of card.element.querySelectorAll(".maps button")) {
    other.setAttribute("aria-pressed", String(other === button));
  }
  card.map = map && { seen, weights: map.weights };
  drawMap(card, card.map);
}

// The size of the centre of an image that the network sees, as shares of its own;
// with "pad", which sees borders around it, more than all of it.
function seenPart(seen, width, height) {
  const share = seen.crop_share;
  if (seen.resize === "squash" || seen.resize === "native") return { width: share, height: share };
  const [rows, cols] = seen.size;
  const fit = seen.resize === "pad" ? Math.max : Math.min;
  const scale = fit(height / (rows / share), width / (cols / share)); // pixels of the file in one of the crop
  return { width: (cols * scale) / width, height: (rows * scale) / height };
}

function drawMap(card, map) {
  const canvas = card.element.querySelector("canvas");
  const image = card.element.querySelector("img");
  canvas.hidden = !map || image.hidden;
  if (canvas.hidden) return;
  const rows = map.weights.length;
  const cols = map.weights[0].length;
  const largest = Math.max(...map.weights.flat(), 1e-12);
  const small = document.createElement("canvas");
  small.width = cols;
  small.height = rows;
  const pixels = new ImageData(cols, rows);
  map.weights.flat().forEach((weight, index) => {
    pixels.data.set([255, 80, 0, Math.round(215 * (weight / largest))], 4 * index);
  });
  small.getContext("2d").putImageData(pixels, 0, 0);
  // the image is as large as its box allows (object-fit: contain)
  const box = image.getBoundingClientRect();
  const fit = Math.min(box.width / image.naturalWidth, box.height / image.naturalHeight);
  const shown = { width: image.naturalWidth * fit, height: image.naturalHeight * fit };
  const part = card.whole ? { width: 1, height: 1 } : seenPart(map.seen, image.naturalWidth, image.naturalHeight);
  const [w, h] = [part.width, part.height].map((size) => Math.min(size, 1)); // without borders
  canvas.width = Math.max(Math.round(w * shown.width), 1);
  canvas.height = Math.max(Math.round(h * shown.height), 1);
  canvas.style.left = `${(box.width - w * shown.width) / 2}px`;
  canvas.style.top = `${(box.height - h * shown.height) / 2}px`;
  const context = canvas.getContext("2d");
  context.fillStyle = "rgb(255 255 255 / 35%)";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  const [x, y] = [(cols * w) / part.width, (rows * h) / part.height];
  context.drawImage(small, (cols - x) / 2, (rows - y) / 2, x, y, 0, 0, canvas.width, canvas.height);
}

// --- events ------------------------------------------------------------------------------------

$("choose").onclick = () => $("files").click();
$("photograph").onclick = () => $("camera").click();
for (const id of ["files", "camera"]) {
  $(id).onchange = (event) => { addFiles(event.target.files); event.target.value = ""; };
}
$("clear").onclick = () => { clearAll(); $("results-title").focus(); say("the history is empty"); };
$("model").onchange = showModel;
for (const id of ["top", "reject", "sets"]) $(id).onchange = showCode;
for (const button of document.querySelectorAll("[data-copy]")) {
  button.onclick = () => copy($(button.dataset.copy).textContent, button);
}
$("access").onsubmit = (event) => {
  event.preventDefault();
  state.token = $("token").value.trim();
  sessionStorage.setItem("vit-token", state.token);
  $("token").value = "";
  loadModels();
};

document.documentElement.classList.toggle("touch", navigator.maxTouchPoints > 0);

let depth = 0;
addEventListener("dragenter", (event) => { event.preventDefault(); depth += 1; $("drop").classList.add("over"); });
addEventListener("dragleave", () => { depth -= 1; if (depth <= 0) $("drop").classList.remove("over"); });
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  depth = 0;
  $("drop").classList.remove("over");
  addFiles(event.dataTransfer.files);
});
addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); addFiles(files); }
});
addEventListener("resize", () => {
  for (const element of $("results").children) if (element.card.map) drawMap(element.card, element.card.map);
});
loadModels();
