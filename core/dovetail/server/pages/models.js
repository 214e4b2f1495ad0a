// What the server serves: the choice of the model and of an adapter, each shown only if there is something to choose.

import { get } from "./api.js";
import { $, el } from "./dom.js";
import { keepSettings, keptSetting } from "./settings.js";

let cards = [];

/** Read the models of the server and offer them. An adapter is a model that names its base as `parent`. */
export async function readModels() {
  cards = (await get("v1/models")).data;
  offer("model-choice", cards.filter((card) => !card.parent).map(({ id }) => [id, id]), keptSetting("model-choice"));
  choseModel(keptSetting("adapter"));
}

/** Offer the adapters of the chosen model, and show what is chosen. */
export function choseModel(adapter = $("adapter").value) {
  const base = cards.find(({ id }) => id === $("model-choice").value);
  const fits = ({ parent }) => parent === base?.id || cards.some(({ id, root }) => id === parent && root && root === base?.root);
  const adapters = cards.filter((card) => card.parent && fits(card));
  offer("adapter", [["", "none"], ...adapters.map(({ id }) => [id, id])], adapter);
  showChoice();
}

/** Choose what has answered last in a conversation, if it is still served. */
export function choose(name) {
  const card = cards.find(({ id }) => id === name);
  if (!card) return;
  const bases = [...$("model-choice").options].map(({ value }) => value);
  const base = card.parent ? (bases.find((id) => id === card.parent) ?? bases[0]) : card.id;
  $("model-choice").value = base;
  choseModel(card.parent ? card.id : "");
  keepSettings();
}

/** Show the chosen model and adapter. */
export function showChoice() {
  const name = [$("model-choice").value, $("adapter").value].filter(Boolean).join(" + ");
  $("model").textContent = $("who").textContent = name;
  document.title = `${name} · Dovetail`;
}

/** Return whether there is a choice, so that answers name their model. */
export const several = () => cards.length > 1;

/** Fill a list with [value, text] pairs. */
function offer(id, choices, chosen) {
  $(id).replaceChildren(...choices.map(([value, textContent]) => el("option", { value, textContent })));
  if (choices.some(([value]) => value === chosen)) $(id).value = chosen;
  $(id).closest("label").hidden = choices.length < 2;
  $("models").hidden = cards.length < 2;
}
