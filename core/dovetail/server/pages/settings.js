// The settings of the chat: stored in this tab, checked before a request is sent.

import { $, keep, kept } from "./dom.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "seed"];
const JSONS = {
  schema: [(value) => typeof value === "boolean" || isObject(value), "A schema is a JSON object."],
  tools: [Array.isArray, "Tools are a JSON array."],
  further: [isObject, "Further fields are a JSON object."],
};
const FIELDS = [...NUMBERS, ...Object.keys(JSONS), "system", "stops", "key"];

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** An invalid setting. `field` is its element. */
export class WrongSetting extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Load the stored settings and store changes. `changed(id)` is called after a change. */
export function openSettings(changed) {
  for (const [id, value] of Object.entries(kept("settings", {}))) if ($(id)) $(id).value = value;
  for (const id of FIELDS) {
    $(id).addEventListener("input", () => {
      keep("settings", Object.fromEntries(FIELDS.map((name) => [name, $(name).value])));
      if (id in JSONS) showProblem(id);
    });
    $(id).addEventListener("change", () => changed(id));
  }
  Object.keys(JSONS).forEach(showProblem);
}

function showProblem(id) {
  const problem = $(`${id}-problem`);
  problem.textContent = parsed(id).problem ?? "";
  problem.hidden = !problem.textContent;
  $(id).setAttribute("aria-invalid", String(!problem.hidden));
}

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
  if (problem) throw new WrongSetting($(id), problem);
  return value;
}

function numbers() {
  const given = {};
  for (const id of NUMBERS) {
    if (!$(id).validity.valid) throw new WrongSetting($(id), `${id}: ${$(id).validationMessage}`);
    if ($(id).value !== "") given[id] = $(id).valueAsNumber;
  }
  return given;
}

/** Return the fields of a request without its messages. Throws WrongSetting. */
export function requestFields() {
  const [schema, tools, further] = Object.keys(JSONS).map(json);
  const stop = $("stops").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  return {
    ...numbers(),
    ...(stop.length && { stop }),
    ...(schema !== undefined && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
    ...(tools?.length && { tools }),
    ...further,
  };
}
