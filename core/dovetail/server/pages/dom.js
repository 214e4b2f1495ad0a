// Helpers for elements, the storage of the tab and the clipboard. Texts of the model, the server and the user become text
// nodes, never markup.

export const $ = (id) => document.getElementById(id);

/** Return an element with properties and children. Children that are null are left out. */
export function el(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Return a button without emphasis. */
export const button = (textContent, onclick) => el("button", { type: "button", className: "small", textContent, onclick });

/** Return a button that copies a text and shows for a moment whether it could. */
export function copyButton(label, text) {
  const node = button("Copy", async () => {
    node.textContent = (await copied(text)) ? "Copied" : "Not copied";
    setTimeout(() => (node.textContent = "Copy"), 2000);
  });
  node.ariaLabel = label;
  node.setAttribute("aria-live", "polite");
  return node;
}

/** Copy a text; returns whether it was copied. The clipboard's own interface exists on https and localhost only. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const field = el("textarea", { value: text, className: "offscreen" });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

/** Return the value that this tab has stored under a name. */
export function kept(name, otherwise) {
  try {
    return JSON.parse(sessionStorage.getItem(`dovetail.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Store a value until the tab is closed. If the storage is full, the value is lost on reload. */
export function keep(name, value) {
  try {
    sessionStorage.setItem(`dovetail.${name}`, JSON.stringify(value));
  } catch {
    sessionStorage.removeItem(`dovetail.${name}`);
  }
}
