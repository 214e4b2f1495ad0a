// The chat: its turns, the answer that is running, and the keys and buttons that control it.

import { grow, newAnswer, view } from "./answer.js";
import { Failure, chunks, get } from "./api.js";
import { $, el, keep, kept } from "./dom.js";
import { showParts } from "./parts.js";
import { WrongSetting, openSettings, requestFields } from "./settings.js";

const WIDE = matchMedia("(min-width: 821px)");
let turns = kept("turns", []);
let views = [];
let model = null;
let running = null; // the AbortController of the running answer
let editing = null; // the index of the message that is being edited

/** Return the messages to send. An answer that failed before its first token is left out. */
function messages() {
  const system = $("system").value.trim();
  const sent = turns.filter((turn) => turn.role !== "assistant" || turn.content || turn.calls.length);
  return [...(system ? [{ role: "system", content: system }] : []), ...sent.map(message)];
}

function message({ role, content, calls, id }) {
  if (role === "tool") return { role, content, tool_call_id: id };
  return calls?.length ? { role, content: content || null, tool_calls: calls } : { role, content };
}

/** Keep the first `upto` turns, append `added`, and request an answer. */
async function ask(upto, ...added) {
  let fields;
  try {
    fields = requestFields();
  } catch (error) {
    if (!(error instanceof WrongSetting)) throw error;
    return complain(error);
  }
  $("problem").hidden = true;
  turns = [...turns.slice(0, upto), ...added];
  const body = { model, ...fields, messages: messages(), stream: true, stream_options: { include_usage: true } };
  turns.push(newAnswer("response_format" in body));
  editing = null;
  keep("turns", turns);
  running = new AbortController();
  show();
  await answer(turns.at(-1), views.at(-1), body);
  running = null;
  keep("turns", turns);
  show();
}

async function answer(turn, shown, body) {
  shown.busy(true);
  try {
    for await (const chunk of chunks(body, running.signal)) {
      const follow = atEnd();
      shown.add(grow(turn, chunk));
      if (follow) toEnd();
    }
  } catch (error) {
    turn.calls = []; // they may be incomplete
    if (error.name === "AbortError") turn.stopped = true;
    else turn.error = error instanceof Failure ? error.message : `The page has failed: ${error.message}`;
  }
}

function complain({ field, message: words }) {
  $("problem").textContent = `Not sent. ${words}`;
  $("problem").hidden = false;
  openAside(true);
  if ($("more").contains(field)) $("more").open = true;
  field.focus();
  field.reportValidity();
}

/** Draw the chat. While an answer is running, only its turn changes. */
function show() {
  views = turns.map((turn) => view(turn, model ?? "Answer"));
  $("log").replaceChildren(...views.map((one) => one.node));
  const last = turns.length - 1;
  const lastMessage = turns.findLastIndex((turn) => turn.role === "user");
  turns.forEach((turn, i) => {
    if (running && i === last) return;
    const buttons = turn.role === "assistant" && turn.content ? [copyButton(turn)] : [];
    if (!running && i === last && turn.role === "assistant") buttons.push(button("Retry", () => ask(last)));
    if (!running && i === lastMessage) buttons.push(button("Edit", () => edit(lastMessage)));
    views[i].finish(...buttons);
    if (!running && i === last && turn.calls?.length && !turn.error) views[i].below.append(resultForm(turn));
  });
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("editing").hidden = editing === null;
  toEnd();
}

const button = (textContent, onclick) => el("button", { type: "button", className: "small", textContent, onclick });

const copyButton = (turn) =>
  navigator.clipboard ? button("Copy", (event) => navigator.clipboard.writeText(turn.content).then(() => (event.target.textContent = "Copied"))) : null;

/** Return a form in which the user enters the results of the functions that the model has called. */
function resultForm({ calls }) {
  const inputs = calls.map(({ function: { name } }) => el("input", { ariaLabel: `Result of ${name}`, placeholder: `what ${name} returns`, required: true }));
  const form = el("form", { className: "call" }, ...inputs, el("button", { textContent: "Send results" }));
  form.onsubmit = (event) => {
    event.preventDefault();
    ask(turns.length, ...calls.map(({ id }, i) => ({ role: "tool", id, content: inputs[i].value })));
  };
  return form;
}

function send() {
  const content = $("message").value;
  if (running || !content.trim()) return;
  const upto = editing ?? turns.length;
  ask(upto, { role: "user", content });
  if (!running) return;
  setMessage("");
  $("message").focus();
}

function edit(place) {
  editing = place;
  $("editing").hidden = false;
  setMessage(turns[place].content);
  $("message").focus();
}

function escape() {
  if (running) running.abort();
  else if (editing !== null) {
    editing = null;
    $("editing").hidden = true;
    setMessage("");
  } else if (!WIDE.matches) openAside(false);
}

function setMessage(text) {
  $("message").value = text;
  fit();
}

function fit() {
  $("message").style.height = "auto";
  $("message").style.height = `${$("message").scrollHeight}px`;
}

const atEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 40;
const toEnd = () => ($("scroll").scrollTop = $("scroll").scrollHeight);

function openAside(open) {
  document.body.classList.toggle("settings", open);
  $("toggle").setAttribute("aria-expanded", String(open));
}

async function connect() {
  try {
    model = (await get("v1/models")).data[0].id;
    $("model").textContent = $("who").textContent = model;
    document.title = `${model} · Dovetail`;
    $("problem").hidden = true;
  } catch (error) {
    $("problem").textContent = error.message;
    $("problem").hidden = false;
    $("more").open ||= error.status === 401;
  }
  if ($("parts").open) showParts();
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
$("message").oninput = fit;
$("message").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};
document.addEventListener("keydown", (event) => event.key === "Escape" && escape());
$("stop").onclick = () => running?.abort();
$("new").onclick = () => {
  running?.abort();
  turns = [];
  editing = null;
  keep("turns", turns);
  show();
  $("message").focus();
};
$("toggle").onclick = () => openAside(!document.body.classList.contains("settings"));
$("close").onclick = () => openAside(false);
$("parts").addEventListener("toggle", () => $("parts").open && showParts());

openSettings((id) => {
  $("problem").hidden = true;
  if (id === "key") connect();
});
openAside(WIDE.matches);
show();
connect();
