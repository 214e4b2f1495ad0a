// The panel of loaded plugins: what was chosen for each component of the engine, and why the others were not.

import { get } from "./api.js";
import { $, el } from "./dom.js";

/** Read the info of the server and show it. */
export async function showParts() {
  try {
    const info = await get("server_info");
    const resolved = info.engine.resolved;
    const rows = resolved.resolutions?.map(resolution) ?? Object.entries(resolved.chosen).map(bare);
    $("plugins").replaceChildren(el("p", { className: "hint", textContent: facts(info) }), ...rows);
  } catch (error) {
    const words = `The server does not show its components: ${error.message} If it has tenants, this needs an admin key.`;
    $("plugins").replaceChildren(el("p", { className: "error", textContent: words }));
  }
}

function facts({ version, engine }) {
  const device = engine.resolved.machine?.device_name;
  return [`Dovetail ${version}`, device, `context of ${engine.context_len} tokens`].filter(Boolean).join(" · ");
}

const bare = ([slot, chosen]) => part(slot, chosen?.name, "");

function resolution({ slot, chosen, rule, note, candidates }) {
  const why = [rule === "priority" ? "by priority" : rule, note].filter(Boolean).join("; ");
  const others = candidates.filter((candidate) => candidate.name !== chosen);
  return part(slot, chosen, why, others.map(verdict));
}

function part(slot, name, why, others = []) {
  const head = el("div", {}, `${slot}: `, el("b", { textContent: name ?? "none" }));
  const list = others.length
    ? el("details", {}, el("summary", { textContent: others.length === 1 ? "1 other" : `${others.length} others` }), el("ul", {}, ...others))
    : null;
  return el("div", { className: "part" }, head, why ? el("p", { textContent: why }) : null, list);
}

function verdict({ name, verdict, reasons }) {
  const why = reasons.map(({ expected, got }) => `${expected}, ${got}`).join("; ");
  return el("li", { textContent: `${name}: ${verdict}${why && `; ${why}`}` });
}
