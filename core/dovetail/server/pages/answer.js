// One turn of the chat: its data, to which chunks are added, and its element.

import { el } from "./dom.js";
import { markdownView } from "./markdown.js";

const QUIET = 5; // seconds without text after which the user sees how long it has been

/** Return an empty answer. `begun` is the time of the request, in milliseconds. */
export const newAnswer = (model, schema) => ({ role: "assistant", model, content: "", reasoning: "", calls: [], begun: performance.now(), schema });

/** Add a chunk of the stream to a turn. Returns what it adds to content and reasoning. */
export function grow(turn, { choices, usage }) {
  const now = performance.now();
  if (usage) Object.assign(turn, { usage });
  if (!choices.length) return {};
  const [{ delta, finish_reason: finish }] = choices;
  turn.first ??= now;
  turn.last = now;
  turn.finish = finish ?? turn.finish;
  const content = delta.content ?? "";
  const reasoning = delta.reasoning_content ?? "";
  turn.content += content;
  turn.reasoning += reasoning;
  for (const call of delta.tool_calls ?? []) growCall(turn.calls, call);
  return { content, reasoning, calls: delta.tool_calls };
}

function growCall(calls, { index, id, function: { name, arguments: text } }) {
  calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
  calls[index].function.arguments += text ?? "";
}

/** Return [name, value, class] of each figure below an answer. */
function figures({ usage, begun, first, last, finish, stopped, schema, content, model, named }) {
  const rows = [];
  if (usage) {
    rows.push(["prompt", usage.prompt_tokens]);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    rows.push(["cached", cached, cached ? "good" : ""], ["output", usage.completion_tokens]);
  }
  if (first) rows.push(["to first token", `${number(first - begun)} ms`]);
  const more = usage ? usage.completion_tokens - 1 : 0;
  if (more > 0 && last > first) rows.push(["tokens/s", number((1000 * more) / (last - first))]);
  const drafts = usage?.speculation;
  if (drafts) rows.push(["drafts accepted", `${drafts.accepted_tokens} of ${drafts.drafted_tokens}`]);
  if (schema && finish) rows.push(isJson(content) ? ["JSON", "valid", "good"] : ["JSON", "incomplete", "bad"]);
  if (named) rows.push(["model", model]);
  rows.push(["finish", stopped ? "stopped by you" : (finish ?? "none"), finish === "length" ? "bad" : ""]);
  return rows;
}

const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: value < 100 ? 2 : 3 + (value >= 1000) });

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** Return whether the reasoning of a turn is folded: it is, as soon as text or a call follows. */
const folds = (turn) => Boolean(turn.content || turn.calls?.length);

/** Return the element of a turn and what changes it: `add` shows what a chunk has added, `finish` the complete turn. */
export function view(turn) {
  const names = { user: "You", assistant: turn.model || "Answer", tool: "Result of a tool" };
  const thought = document.createTextNode(turn.reasoning ?? "");
  const reasoning = el("details", { className: "reasoning", hidden: !turn.reasoning, open: !folds(turn) }, el("summary", { textContent: "Reasoning" }), el("div", { dir: "auto" }, thought));
  const text = textView(turn);
  const calls = el("div", {}, ...(turn.calls ?? []).map(callView));
  const below = el("div");
  const node = el("article", { className: turn.role, ariaLabel: names[turn.role] }, reasoning, text.node, calls, below);
  let folded = folds(turn);
  const add = (delta) => {
    if (delta.reasoning) reasoning.hidden = false;
    if (!folded && folds(turn)) reasoning.open = false;
    folded = folds(turn);
    thought.appendData(delta.reasoning ?? "");
    if (delta.content) text.later();
    if (delta.calls?.length) calls.replaceChildren(...turn.calls.map(callView));
  };
  const busy = (is) => {
    node.classList.toggle("busy", is);
    node.setAttribute("aria-busy", String(is));
  };
  const wait = (seconds) => below.replaceChildren(...(seconds < QUIET ? [] : [el("p", { className: "hint", textContent: `Waiting: no text for ${seconds} s.` })]));
  const finish = (...buttons) => {
    busy(false);
    text.now();
    text.node.hidden = !turn.content;
    if (!turn.calls?.length) calls.replaceChildren();
    const nothing = !turn.content && !turn.calls?.length && !turn.error;
    const row = el("div", { className: "row" }, turn.role === "assistant" && !turn.error ? readout(turn) : null, ...buttons);
    const note = turn.error ? ["error", turn.error] : nothing ? ["nothing", "The answer has no text."] : null;
    below.replaceChildren(...(note ? [el("div", { className: note[0], textContent: note[1] })] : []), row);
  };
  return { node, add, busy, wait, finish, below };
}

/** Return the element of a turn's text. `later` draws it with the next frame at the earliest, and rarely if drawing is slow. */
function textView(turn) {
  const marked = turn.role === "assistant" && !turn.schema ? markdownView() : null;
  const node = el("div", { className: turn.schema ? "text json" : "text", dir: "auto" }, ...(marked ? [marked.node] : []));
  let planned = false;
  let earliest = 0;
  let drawn = null;
  const now = () => {
    if (drawn === turn.content) return;
    const begun = performance.now();
    if (marked) marked.show(turn.content);
    else node.textContent = turn.content;
    drawn = turn.content;
    earliest = performance.now() + 4 * (performance.now() - begun);
  };
  const frame = () => {
    if (performance.now() < earliest) return requestAnimationFrame(frame);
    planned = false;
    now();
  };
  const later = () => {
    if (!planned) requestAnimationFrame(frame);
    planned = true;
  };
  return { node, now, later };
}

function callView({ function: { name, arguments: text } }) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* the JSON is not complete yet */ }
  return el("div", { className: "call" }, "Calls ", el("code", { textContent: name }), el("pre", { textContent: shown }));
}

function readout(turn) {
  const rows = figures(turn).map(([name, value, className = ""]) =>
    el("div", { className: name === "finish" ? "first" : "" }, el("dt", { textContent: name }), el("dd", { className, textContent: String(value) })),
  );
  return el("dl", { ariaLabel: "Figures of this answer" }, ...rows);
}
