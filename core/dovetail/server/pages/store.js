// The conversations that this browser stores, each under its own name, so that two tabs do not overwrite each other's.

const PREFIX = "dovetail.conversation.";
const MOST_TITLE = 60;

/** The conversations by id. */
export const conversations = new Map();

/** Return a conversation that is not stored before it has a message. */
export function newConversation() {
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", system: "", model: "", turns: [], created: Date.now(), changed: Date.now() };
}

/** Return the conversations, the one that was changed last first. */
export const listed = () => [...conversations.values()].sort((a, b) => b.changed - a.changed);

/** Return the title of a conversation: the user's, or the beginning of the first message. */
export function titleOf({ title, turns }) {
  const text = (title || turns.find((turn) => turn.role === "user")?.content || "").replace(/\s+/g, " ").trim();
  if (text.length <= MOST_TITLE || title) return text || "New conversation";
  return `${[...text].slice(0, MOST_TITLE).join("").trimEnd()}…`;
}

/** Read all conversations. Stored values that are not conversations are left alone. */
export function load() {
  conversations.clear();
  for (let i = 0; i < localStorage.length; i += 1) {
    const name = localStorage.key(i);
    if (name.startsWith(PREFIX)) refresh(name);
  }
}

/** Read what another tab has stored or removed under a name. Returns the id of the conversation, or null if it is none. */
export function refresh(name) {
  if (!name?.startsWith(PREFIX)) return null;
  const id = name.slice(PREFIX.length);
  const read = parsed(localStorage.getItem(name));
  if (read) conversations.set(id, { ...newConversation(), ...read, id });
  else conversations.delete(id);
  return id;
}

function parsed(text) {
  try {
    const value = JSON.parse(text);
    return Array.isArray(value?.turns) && value.turns.every(isTurn) ? value : null;
  } catch {
    return null;
  }
}

const isTurn = (turn) => isText(turn?.role) && isText(turn.content) && (turn.calls === undefined || (Array.isArray(turn.calls) && turn.calls.every(isCall)));
const isCall = (call) => isText(call?.function?.name) && isText(call.function.arguments);
const isText = (value) => typeof value === "string";

/** Store a conversation. Returns whether the browser had space for it. */
export function save(conversation) {
  conversations.set(conversation.id, conversation);
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function remove({ id }) {
  conversations.delete(id);
  localStorage.removeItem(PREFIX + id);
}

/** Return the messages of a conversation as the API takes them. An answer that has failed before its first token is left out. */
export function messagesOf({ system, turns }) {
  const sent = turns.filter((turn) => turn.role !== "assistant" || turn.content || turn.calls?.length);
  return [...(system.trim() ? [{ role: "system", content: system.trim() }] : []), ...sent.map(message)];
}

function message({ role, content, calls, id }) {
  if (role === "tool") return { role, content, tool_call_id: id };
  return calls?.length ? { role, content: content || null, tool_calls: calls } : { role, content };
}

/** Return what is exported of a conversation: its messages as the API takes them, with the reasoning. */
export function exported(conversation) {
  const { model, created, changed } = conversation;
  const reasoning = conversation.turns.filter((turn) => turn.role !== "assistant" || turn.content || turn.calls?.length).map((turn) => turn.reasoning);
  const messages = messagesOf(conversation);
  const first = messages.length - reasoning.length;
  const all = messages.map((one, i) => (reasoning[i - first] ? { ...one, reasoning_content: reasoning[i - first] } : one));
  const time = (value) => new Date(value).toISOString();
  return { title: titleOf(conversation), model, created: time(created), changed: time(changed), messages: all };
}
