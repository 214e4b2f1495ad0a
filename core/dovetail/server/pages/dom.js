// Helpers for elements and storage. Texts of the model, the server and the user become text nodes, never markup.

export const $ = (id) => document.getElementById(id);

/** Return an element with properties and children. Children that are null are left out. */
export function el(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children.filter((child) => child !== null));
  return node;
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
