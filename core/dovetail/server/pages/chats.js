// The list of conversations, with what can be done to each of them.

import { $, button, el } from "./dom.js";
import { conversations, exported, listed, save, titleOf } from "./store.js";

let shown = null;

/** Show the list, unless a title is being changed. `current` is the open conversation, `answering(id)` says whether one is being answered. `open` and `remove`
 * do what the user chooses. */
export function showList(...state) {
  shown = state;
  if ($("list").querySelector("input")) return;
  const [current, answering, open, remove] = state;
  const item = (conversation) => {
    const here = conversation.id === current.id;
    const title = el("button", { type: "button", className: "title", dir: "auto", textContent: titleOf(conversation), onclick: () => open(conversation) });
    title.title = new Date(conversation.changed).toLocaleString();
    if (here) title.ariaCurrent = "true";
    if (answering(conversation.id)) title.append(el("span", { className: "hint", textContent: " answering …" }));
    const node = el("li", {}, title);
    if (here) node.append(el("div", { className: "row" }, button("Rename", () => rename(conversation, title)), button("Export", () => download(conversation)), button("Delete", () => remove(conversation))));
    return node;
  };
  $("list").replaceChildren(...listed().map(item));
  $("none").hidden = conversations.size > 0;
  $("export").hidden = conversations.size === 0;
}

/** Replace the title by a field. Enter stores the title, and so does leaving the field; Escape does not. */
function rename(conversation, title) {
  const field = el("input", { value: titleOf(conversation), ariaLabel: "Title of the conversation", maxLength: 200, dir: "auto" });
  let done = false;
  const close = (keep, focus = true) => {
    if (done) return;
    done = true;
    if (keep && field.value.trim()) {
      conversation.title = field.value.trim();
      save(conversation);
    }
    field.remove();
    showList(...shown);
    if (focus) $("list").querySelector("[aria-current]")?.focus();
  };
  field.onblur = () => close(true, false);
  field.onkeydown = (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.stopPropagation();
    event.preventDefault();
    close(event.key === "Enter");
  };
  title.replaceWith(field);
  field.select();
}

function download(conversation) {
  const name = titleOf(conversation).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  offerFile(`${name || "conversation"}.json`, exported(conversation));
}

/** Download all conversations as one file. */
export const downloadAll = () => offerFile("conversations.json", listed().map(exported));

function offerFile(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
