// The interactive page "Choose a graph": reads the form, draws what minilora would do.

import { captureKeys, dispatch, kernelMeta } from "./dispatch.js";

// Light enough for black text on each of them.
const COLOURS = ["#7db8e8", "#ffb266", "#84cf84", "#f29a9a", "#c6a8e4", "#cfae9f", "#f2b8dd", "#7ad7e0"];
const PRESETS = {
  example: [[2, 1], [-1, 1], [0, 1]],
  base: [[-1, 1], [-1, 1], [-1, 1], [-1, 1], [-1, 1]],
  distinct: [[0, 1], [1, 1], [2, 1]],
  prefill: [[0, 1], [1, 1], [-1, 6]],
  long: [[0, 1], [1, 40]],
};

const root = document.getElementById("explorer");
const field = (name) => root.querySelector(`[name=${name}]`);
let requests = PRESETS.example.map((request) => [...request]);

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const label = (slot) => (slot < 0 ? "no adapter" : `slot ${slot}`);

// ---- reading the form

// Returns the number in a field, and adds a sentence to `problems` if it is none or out of range.
function number(name, problems) {
  const { value, min, max } = field(name);
  const found = Number(value);
  const fits = value.trim() !== "" && Number.isInteger(found) && found >= min && found <= max;
  field(name).setAttribute("aria-invalid", String(!fits));
  if (!fits) problems.push(`${name} must be a whole number from ${min} to ${max}`);
  return found;
}

function readSizes(limit) {
  const text = field("capture_sizes").value.trim();
  if (!text) return { sizes: null };
  const sizes = text.split(/[\s,]+/).map(Number);
  const whole = sizes.every((size) => Number.isInteger(size) && size > 0);
  if (!whole) return { problem: "capture_sizes must be whole numbers, such as 1, 2, 4, 8" };
  if (sizes.some((size, i) => i > 0 && size <= sizes[i - 1]))
    return { problem: "capture_sizes must ascend without repeats" };
  if (sizes[sizes.length - 1] > limit)
    return { problem: `capture_sizes: ${sizes[sizes.length - 1]} is over ${limit}, the most rows of a step` };
  return { sizes };
}

function readOptions() {
  const problems = [];
  const slots = number("max_loras", problems);
  const options = {
    maxLoras: field("enable_lora").checked ? slots : 0,
    maxNumSeqs: number("max_num_seqs", problems),
    maxNumBatchedTokens: number("max_num_batched_tokens", problems),
    graphMode: field("graph_mode").value,
    specializeLora: field("specialize_lora").checked,
    specializeActiveLora: field("specialize_active_lora").checked,
  };
  const limit = options.graphMode === "full" ? options.maxNumSeqs : options.maxNumBatchedTokens;
  const { sizes, problem } = readSizes(limit);
  return { ...options, captureSizes: sizes, problem: problems[0] || problem };
}

// ---- the step

function readStep() {
  const order = [...requests].sort((a, b) => (a[1] > 1) - (b[1] > 1)); // decodes come first
  const mapping = order.flatMap(([slot, tokens]) => Array(tokens).fill(slot));
  const adapters = new Set(mapping.filter((slot) => slot >= 0));
  return { mapping, adapters: adapters.size, uniform: requests.every(([, n]) => n === 1) };
}

function problemOf(options) {
  if (options.problem) return options.problem;
  const wrong = requests.findIndex(([, tokens]) => !Number.isInteger(tokens) || tokens < 1 || tokens > 64);
  if (wrong >= 0) return `request ${wrong} must have from 1 to 64 new tokens`;
  const step = readStep();
  if (requests.length > options.maxNumSeqs)
    return `a step has at most max_num_seqs=${options.maxNumSeqs} requests; the scheduler would let the others wait`;
  if (step.mapping.length > options.maxNumBatchedTokens)
    return `a step has at most max_num_batched_tokens=${options.maxNumBatchedTokens} rows; the scheduler would cut the prompt into chunks`;
  if (step.mapping.some((slot) => slot >= options.maxLoras))
    return `a request uses a slot that does not exist with ${options.maxLoras} slots`;
  return "";
}

// ---- drawing

// Makes the list of requests anew; only where one came or went, or there are other slots.
function drawRequests(slots) {
  const list = root.querySelector(".requests");
  list.replaceChildren(
    ...requests.map((request, index) => {
      const row = element("li", "");
      const slot = element("select", "", { "aria-label": `adapter of request ${index}` });
      for (let s = -1; s < Math.max(slots, request[0] + 1); s += 1)
        slot.append(element("option", label(s), { value: s }));
      slot.value = request[0];
      slot.addEventListener("input", () => (request[0] = Number(slot.value)));
      const tokens = element("input", "", {
        "aria-label": `new tokens of request ${index}`, type: "number", min: 1, max: 64, value: request[1],
      });
      tokens.addEventListener("input", () => (request[1] = Number(tokens.value)));
      const remove = element("button", "remove", { type: "button", "aria-label": `remove request ${index}` });
      remove.disabled = requests.length === 1;
      remove.addEventListener("click", () => {
        change(() => requests.splice(index, 1));
        const others = list.querySelectorAll("button:enabled");
        (others[Math.min(index, others.length - 1)] || root.querySelector(".add")).focus();
      });
      row.append(`request ${index}: `, slot, " ", tokens, " new tokens ", remove);
      return row;
    }),
  );
}

function drawRows(meta, real) {
  const rows = meta.token_lora_mapping.slice(0, 64).map((slot, row) => {
    const cell = element("span", row < real ? (slot < 0 ? "base" : `slot ${slot}`) : "padding", { class: "row" });
    if (row >= real) cell.classList.add("padding");
    else if (slot >= 0) cell.style.backgroundColor = COLOURS[slot];
    if (row < real && slot >= 0) cell.style.color = "#000";
    cell.title = `row ${row}`;
    return cell;
  });
  const more = meta.token_lora_mapping.length - rows.length;
  if (more > 0) rows.push(element("span", `and ${more} rows`));
  root.querySelector(".rows").replaceChildren(...rows);
}

function drawMeta(meta) {
  const short = (values) =>
    values.length > 24 ? `[${values.slice(0, 20).join(", ")}, ... ${values.length} in all]` : `[${values.join(", ")}]`;
  const lines = Object.entries(meta).map(([name, values]) => {
    const line = document.createElement("tr");
    const cell = element("td", "");
    cell.append(element("code", short(values)));
    line.append(element("th", name, { scope: "row" }), cell);
    return line;
  });
  root.querySelector(".meta tbody").replaceChildren(...lines);
}

function drawKeys(keys, chosen) {
  const parts = Object.entries(keys).filter(([, sizes]) => sizes.size).map(([mode, sizes]) => {
    const block = element("div", "");
    block.append(element("h3", `${mode}: ${[...sizes.values()].flat().length} graphs`));
    for (const [rows, counts] of [...sizes].slice(0, 24)) {
      for (const count of counts) {
        const key = element("span", `${rows}×${count}`, { class: "key" });
        if (chosen.mode === mode && chosen.rows === rows && chosen.groups === count) {
          key.classList.add("chosen");
          key.setAttribute("aria-current", "true");
        }
        block.append(key, " ");
      }
    }
    if (sizes.size > 24) block.append(` ... up to ${[...sizes.keys()].pop()} rows`);
    return block;
  });
  root.querySelector(".keys").replaceChildren(...parts);
}

function sentence(step, chosen) {
  const [real, n] = [step.mapping.length, step.adapters];
  const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const what = `${many(real, "row")}, ${many(n, "adapter")}, ${step.uniform ? "decode only" : "with a prefill"}: `;
  if (chosen.mode === "NONE")
    return `${what}no graph has room, so the step runs eagerly, with a grid of ${many(chosen.groups, "group")}.`;
  return (
    `${what}the ${chosen.mode} graph of ${many(chosen.rows, "row")} and ${many(chosen.groups, "group")}. ` +
    `${many(chosen.rows - real, "row")} and ${many(chosen.groups - n, "group")} are padding.` +
    (chosen.groups === 0 ? " It has no LoRA launches." : "")
  );
}

function draw() {
  const options = readOptions();
  const problem = problemOf(options);
  const shown = root.querySelector(".result");
  const verdict = root.querySelector(".verdict");
  verdict.classList.toggle("problem", Boolean(problem));
  shown.hidden = Boolean(problem);
  if (problem) {
    verdict.textContent = problem;
    return;
  }
  const step = readStep();
  const keys = captureKeys(options);
  const chosen = dispatch(options, keys, step.mapping.length, step.adapters, step.uniform);
  verdict.textContent = sentence(step, chosen);
  const meta = kernelMeta(step.mapping, chosen.rows, options.maxLoras);
  drawRows(meta, step.mapping.length);
  drawMeta(meta);
  drawKeys(keys, chosen);
}

function change(action) {
  action();
  drawRequests(readOptions().maxLoras || 0);
  draw();
}

if (root) {
  root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  root.querySelector("form").addEventListener("input", draw);
  for (const name of ["max_loras", "enable_lora"])
    field(name).addEventListener("change", () => change(() => {}));
  root.querySelector(".add").addEventListener("click", () => change(() => requests.push([-1, 1])));
  for (const button of root.querySelectorAll("[data-preset]"))
    button.addEventListener("click", () =>
      change(() => (requests = PRESETS[button.dataset.preset].map((request) => [...request]))),
    );
  change(() => {});
}
