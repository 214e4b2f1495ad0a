// The panels beside the chat: conversations and settings. Where there is little space, a panel covers the chat.

import { $, keep, kept } from "./dom.js";

const PANELS = ["chats", "settings"];
const NARROW = matchMedia("(max-width: 820px)");
const SPACE_FOR_BOTH = matchMedia("(min-width: 1100px)");

export const isOpen = (name) => document.body.classList.contains(name);

/** Return whether panels cover the chat. */
export const covering = () => NARROW.matches;

/** Return whether a panel covers the chat now. */
export const overlaid = () => NARROW.matches && PANELS.some(isOpen);

/** Open or close a panel. The focus follows it where it covers the chat. */
export function togglePanel(name) {
  const open = !isOpen(name);
  if (open && !SPACE_FOR_BOTH.matches) PANELS.forEach((other) => set(other, false));
  set(name, open);
  if (!NARROW.matches) keep("panels", PANELS.filter(isOpen));
  if (overlaid()) $(`close-${name}`).focus();
  else if (NARROW.matches) $(`toggle-${name}`).focus();
}

export const closePanels = () => PANELS.filter(isOpen).forEach(togglePanel);

function set(name, open) {
  document.body.classList.toggle(name, open);
  $(`toggle-${name}`).setAttribute("aria-expanded", String(open));
  for (const covered of [document.querySelector("header"), document.querySelector("main")]) covered.inert = overlaid();
}

function arrange() {
  const wide = SPACE_FOR_BOTH.matches ? PANELS : ["settings"];
  PANELS.forEach((name) => set(name, !NARROW.matches && kept("panels", wide).includes(name)));
}

for (const name of PANELS) {
  $(`toggle-${name}`).onclick = $(`close-${name}`).onclick = () => togglePanel(name);
}
NARROW.addEventListener("change", arrange);
arrange();
