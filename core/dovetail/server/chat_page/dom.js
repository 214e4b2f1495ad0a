// Elements. Texts of the model, the server and the user become text nodes, never markup.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children; what is null among the children is left out. */
export function el(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** What this tab kept under a name. */
export function kept(name, otherwise) {
  try {
    return JSON.parse(sessionStorage.getItem(`dovetail.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Keep a value until the tab is closed; where there is no room for it, a reload forgets it. */
export function keep(name, value) {
  try {
    sessionStorage.setItem(`dovetail.${name}`, JSON.stringify(value));
  } catch {
    sessionStorage.removeItem(`dovetail.${name}`);
  }
}
