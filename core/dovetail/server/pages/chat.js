// The chat: its conversations, the answers that are running, and the keys and buttons that control them.

import { grow, newAnswer, view } from "./answer.js";
import { Failure, chunks } from "./api.js";
import { downloadAll, showList } from "./chats.js";
import { $, button, copyButton, el, keep, kept } from "./dom.js";
import { choose, choseModel, readModels, several, showChoice } from "./models.js";
import { closePanels, covering, isOpen, overlaid, togglePanel } from "./panels.js";
import { showParts } from "./parts.js";
import { WrongSetting, keepSettings, mark, nameOf, openSettings, requestFields, settingOf, unmark } from "./settings.js";
import { conversations, listed, load, messagesOf, newConversation, refresh, remove, save } from "./store.js";

const CLOSED = "The page was closed before the answer was complete.";
const MOST_SPOKEN = 1500; // characters
const running = new Map(); // the AbortController of each conversation that is being answered
const views = new WeakMap(); // the view of each turn
let chat = newConversation();
let editing = null; // the index of the message that is being edited
let leaving = false; // whether the browser is closing the page, which ends its connections
let following = true; // whether the end of the chat stays visible
let top = 0; // where the chat was scrolled to last

/** Keep the first `upto` turns, append `added`, and request an answer. */
async function ask(upto, ...added) {
  let fields;
  try {
    fields = requestFields();
  } catch (error) {
    if (!(error instanceof WrongSetting)) throw error;
    return complain(error);
  }
  const asked = chat;
  asked.system = $("system").value;
  asked.turns = [...asked.turns.slice(0, upto), ...added];
  const body = { ...fields, messages: messagesOf(asked), stream: true, stream_options: { include_usage: true } };
  const turn = newAnswer(body.model, "response_format" in body);
  turn.named = several();
  asked.turns.push(turn);
  asked.model = body.model ?? "";
  editing = null;
  following = true;
  problem("");
  unmark();
  const control = new AbortController();
  running.set(asked.id, control);
  store(asked);
  show();
  $("status").textContent = "Answering …";
  await answer(turn, body, control.signal);
  running.delete(asked.id);
  if (asked === chat) $("status").textContent = spoken(turn);
  if (conversations.has(asked.id)) store(asked); // it may have been deleted meanwhile
  if (asked === chat) show();
  else list();
  if (!$("model-choice").value && !turn.error) connect();
}

async function answer(turn, body, signal) {
  const shown = viewOf(turn);
  let heard = performance.now();
  const clock = setInterval(() => shown.wait(Math.floor((performance.now() - heard) / 1000)), 1000);
  shown.busy(true);
  try {
    for await (const chunk of chunks(body, signal)) {
      shown.add(grow(turn, chunk));
      if (performance.now() - heard > 1000) shown.wait(0);
      heard = performance.now();
    }
  } catch (error) {
    turn.calls = []; // they may be incomplete
    if (leaving) turn.error = CLOSED;
    else if (error.name === "AbortError") turn.stopped = true;
    else refused(turn, error);
  } finally {
    clearInterval(clock);
  }
}

/** Return what a screen reader says when an answer is complete. While it grows, it is silent. */
function spoken({ stopped, error, content, calls }) {
  const text = content.length > MOST_SPOKEN ? `${content.slice(0, MOST_SPOKEN)} … The answer goes on.` : content;
  const called = calls.map((call) => `Calls ${call.function.name}.`);
  return [text, ...called, stopped && "Stopped.", error].filter(Boolean).join("\n") || "The answer has no text.";
}

/** Note an error in a turn, and beside the setting that it concerns. */
function refused(turn, error) {
  turn.error = error instanceof Failure ? error.message : `The page has failed: ${error.message}`;
  const id = settingOf(error);
  if (!id) return;
  turn.wrong = id;
  mark(id, error.message);
  if ($("more").contains($(id))) $("more").open = true;
  if (!covering() && !isOpen("settings")) togglePanel("settings");
}

/** Report a wrong setting before anything is sent. */
function complain({ id, message }) {
  problem(`Not sent. ${nameOf(id)}: ${message}`);
  mark(id, message);
  visit(id);
}

/** Show a setting and move the focus there. */
function visit(id) {
  if (!isOpen("settings")) togglePanel("settings");
  if ($("more").contains($(id))) $("more").open = true;
  $(id).focus();
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function store(conversation) {
  conversation.changed = Date.now();
  if (!save(conversation)) problem("The browser has no space for this conversation: it is lost when the page is closed. Export it, or delete others.");
  keep("open", chat.id);
}

const viewOf = (turn) => views.get(turn) ?? views.set(turn, view(turn)).get(turn);

/** Draw the open conversation and the list. While an answer is running, only its turn changes. */
function show() {
  const { turns } = chat;
  const busy = running.has(chat.id);
  const last = turns.length - 1;
  const lastMessage = turns.findLastIndex((turn) => turn.role === "user");
  turns.forEach((turn, i) => {
    if (busy && i === last) return;
    const shown = viewOf(turn);
    const buttons = turn.role === "assistant" && turn.content ? [copyButton("Copy answer", turn.content)] : [];
    if (!busy && i === last && turn.role === "assistant") buttons.push(button("Retry", () => ask(last)));
    if (!busy && i === lastMessage) buttons.push(button("Edit", () => edit(lastMessage)));
    if (turn.wrong && i === last) buttons.push(button(`Show ${nameOf(turn.wrong)}`, () => visit(turn.wrong)));
    shown.finish(...buttons);
    if (!busy && i === last && turn.calls?.length && !turn.error) shown.below.append(resultForm(turn));
  });
  arrange(turns.map((turn) => viewOf(turn).node));
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("editing").hidden = editing === null;
  list();
  if (following) toEnd();
}

/** Replace the elements of the log from the first one that differs. */
function arrange(nodes) {
  const log = $("log");
  const same = nodes.findIndex((node, i) => log.children[i] !== node);
  while (log.children.length > (same < 0 ? nodes.length : same)) log.lastChild.remove();
  if (same >= 0) log.append(...nodes.slice(same));
}

const list = () => showList(chat, (id) => running.has(id), open, discard);

/** Return a form in which the user enters the results of the functions that the model has called. */
function resultForm({ calls }) {
  const inputs = calls.map(({ function: { name } }) => el("input", { ariaLabel: `Result of ${name}`, placeholder: `what ${name} returns`, required: true }));
  const form = el("form", { className: "call" }, ...inputs, el("button", { textContent: "Send results" }));
  form.onsubmit = (event) => {
    event.preventDefault();
    ask(chat.turns.length, ...calls.map(({ id }, i) => ({ role: "tool", id, content: inputs[i].value })));
  };
  return form;
}

/** Open a conversation. Answers of others go on. */
function open(conversation) {
  chat = conversation;
  editing = null;
  following = true;
  if (chat.turns.length) $("system").value = chat.system;
  keepSettings();
  choose(chat.model);
  keep("open", chat.id);
  setMessage("");
  problem("");
  if (overlaid()) closePanels();
  show();
  $("message").focus();
}

/** Delete a conversation, until the user undoes it. */
function discard(conversation) {
  running.get(conversation.id)?.abort();
  remove(conversation);
  if (conversation === chat) chat = newConversation();
  const undo = button("Undo", () => {
    save(conversation);
    $("notice").replaceChildren();
    open(conversation);
  });
  $("notice").replaceChildren("The conversation is deleted. ", undo);
  show();
  undo.focus();
}

function send() {
  const content = $("message").value;
  if (running.has(chat.id) || !content.trim()) return;
  ask(editing ?? chat.turns.length, { role: "user", content });
  if (!running.has(chat.id)) return;
  $("notice").replaceChildren();
  setMessage("");
  $("message").focus();
}

function edit(place) {
  editing = place;
  $("editing").hidden = false;
  setMessage(chat.turns[place].content);
  $("message").focus();
}

function escape() {
  if (overlaid()) closePanels();
  else if (running.has(chat.id)) running.get(chat.id).abort();
  else if (editing !== null) {
    editing = null;
    $("editing").hidden = true;
    setMessage("");
  }
}

function setMessage(text) {
  $("message").value = text;
  fit();
}

function fit() {
  $("message").style.height = "auto";
  $("message").style.height = `${$("message").scrollHeight}px`;
}

/** Note whether the user has scrolled up, or back to the end. An answer may have grown since the page itself has scrolled. */
function follow() {
  const { scrollHeight, scrollTop, clientHeight } = $("scroll");
  if (scrollHeight - scrollTop - clientHeight < 40) following = true;
  else if (scrollTop < top) following = false;
  top = scrollTop;
}

const toEnd = () => ($("scroll").scrollTop = $("scroll").scrollHeight);

async function connect() {
  try {
    await readModels();
    choose(chat.model);
    problem("");
    mark("key");
  } catch (error) {
    problem(error.message);
    if (error.status !== 401) return;
    mark("key", "The server requires an API key.");
    $("more").open = true;
  }
  if ($("parts").open) showParts();
}

/** Read the stored conversations. An answer that was running when the page was closed is marked. */
function restore() {
  load();
  for (const { turns } of conversations.values()) {
    const last = turns.at(-1);
    if (last?.role === "assistant" && !last.finish && !last.error && !last.stopped) last.error = CLOSED;
  }
  chat = conversations.get(kept("open", null)) ?? chat;
  if (chat.turns.length) $("system").value = chat.system;
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
$("stop").onclick = () => running.get(chat.id)?.abort();
$("new").onclick = () => open(newConversation());
$("export").onclick = downloadAll;
$("parts").addEventListener("toggle", () => $("parts").open && showParts());
$("scroll").addEventListener("scroll", follow);
new ResizeObserver(() => following && toEnd()).observe($("log"));
addEventListener("beforeunload", () => {
  leaving = true;
  setTimeout(() => (leaving = false), 5000); // if the user stays
});
addEventListener("pagehide", () => [...running.keys()].forEach((id) => save(conversations.get(id))));
addEventListener("storage", ({ key }) => {
  const id = refresh(key);
  if (!id || running.has(id)) return;
  if (id === chat.id) editing = null;
  if (id === chat.id) chat = conversations.get(id) ?? newConversation();
  show();
});

openSettings((id) => {
  problem("");
  if (id === "key") connect();
  if (id === "model-choice") choseModel("");
  if (id === "adapter") showChoice();
  keepSettings();
});
restore();
show();
connect();
