// The settings of the chat: stored in this tab, checked before a request is sent, and marked when the server refuses one.

import { $, el, keep, kept } from "./dom.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "seed"];
const JSONS = {
  schema: [(value) => typeof value === "boolean" || isObject(value), "A schema is a JSON object."],
  tools: [Array.isArray, "Tools are a JSON array."],
  further: [isObject, "Further fields are a JSON object."],
};
const FIELDS = [...NUMBERS, ...Object.keys(JSONS), "system", "stops", "key", "model-choice", "adapter"];
const SETTINGS = { max_completion_tokens: "max_tokens", max_new_tokens: "max_tokens", stop: "stops", response_format: "schema", json_schema: "schema", tools: "tools" };

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** An invalid setting. `id` is its element's. */
export class WrongSetting extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

/** Load the stored settings and store changes. `changed(id)` is called after a change. */
export function openSettings(changed) {
  for (const [id, value] of Object.entries(kept("settings", {}))) if ($(id)?.matches("input, textarea")) $(id).value = value;
  for (const id of FIELDS) {
    const problem = el("p", { id: `${id}-problem`, className: "wrong", hidden: true });
    $(id).closest("label").after(problem);
    $(id).setAttribute("aria-describedby", problem.id);
    $(id).addEventListener("input", () => {
      keepSettings();
      mark(id, id in JSONS ? parsed(id).problem : "");
    });
    $(id).addEventListener("change", () => changed(id));
  }
  for (const id of Object.keys(JSONS)) mark(id, parsed(id).problem);
}

/** Store the settings in this tab. */
export const keepSettings = () => keep("settings", Object.fromEntries(FIELDS.map((id) => [id, $(id).value])));

/** Return a setting that this tab has stored. */
export const keptSetting = (id) => kept("settings", {})[id];

/** Show what is wrong with a setting beside it; an empty text says that nothing is. */
export function mark(id, problem = "") {
  $(`${id}-problem`).textContent = problem;
  $(`${id}-problem`).hidden = !problem;
  $(id).setAttribute("aria-invalid", String(Boolean(problem)));
}

/** Remove what was shown beside all settings. */
export const unmark = () => FIELDS.forEach((id) => mark(id));

/** Return the id of the setting that a refusal concerns, or null. `param` is the name of a field of the request. */
export function settingOf({ status, param }) {
  if (status === 401) return "key";
  const name = param?.split(/[.[]/)[0];
  if (!name || name === "messages") return null;
  if (name in (parsed("further").value ?? {})) return "further";
  if (NUMBERS.includes(name)) return name;
  if (name === "model") return $("adapter").value ? "adapter" : "model-choice";
  return SETTINGS[name] ?? null;
}

/** Return what the user calls a setting. */
export const nameOf = (id) => $(id).labels[0].firstChild.textContent.trim();

function parsed(id) {
  const text = $(id).value.trim();
  if (!text) return {};
  try {
    const value = JSON.parse(text);
    const [allowed, otherwise] = JSONS[id];
    return allowed(value) ? { value } : { problem: otherwise };
  } catch (error) {
    return { problem: `This is not JSON: ${error.message}` };
  }
}

function json(id) {
  const { value, problem } = parsed(id);
  if (problem) throw new WrongSetting(id, problem);
  return value;
}

function numbers() {
  const given = {};
  for (const id of NUMBERS) {
    if (!$(id).validity.valid) throw new WrongSetting(id, $(id).validationMessage);
    if ($(id).value !== "") given[id] = $(id).valueAsNumber;
  }
  return given;
}

/** Return the fields of a request without its messages. Throws WrongSetting. */
export function requestFields() {
  const [schema, tools, further] = Object.keys(JSONS).map(json);
  const stop = $("stops").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  return {
    model: $("adapter").value || $("model-choice").value || null,
    ...numbers(),
    ...(stop.length && { stop }),
    ...(schema !== undefined && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
    ...(tools?.length && { tools }),
    ...further,
  };
}
