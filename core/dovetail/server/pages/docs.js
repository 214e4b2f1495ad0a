// The page at /docs: every route that openapi.json describes, with the fields of its body.

import { $, el } from "./dom.js";

const METHODS = ["get", "head", "put", "post", "delete", "patch"];

/** Return what a schema allows in a few words. `root` is the schema that holds the definitions. */
function type(schema, root) {
  if (schema.$ref) return type(target(schema, root), root);
  const any = schema.anyOf ?? schema.oneOf;
  if (any) return [...new Set(any.map((one) => type(one, root)))].filter((one) => one !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${schema.items ? type(schema.items, root) : "anything"}`;
  return schema.type ?? "anything";
}

/** Return the target of a reference, in its own schema or in openapi.json. */
function target({ $ref }, root) {
  const find = (from) => $ref.split("/").slice(1).reduce((node, name) => node?.[name.replaceAll("~1", "/").replaceAll("~0", "~")], from);
  return find(root) ?? find(api) ?? {};
}

function fields(schema) {
  const whole = schema.$ref ? target(schema, api) : schema;
  const root = { ...whole, $defs: whole.$defs ?? schema.$defs };
  const required = new Set(whole.required);
  const names = Object.keys(whole.properties ?? {}).sort((a, b) => required.has(b) - required.has(a));
  const row = (name) => {
    const property = whole.properties[name];
    const more = [required.has(name) ? "required" : "", property.description ?? ""].filter(Boolean).join("; ");
    return el("tr", {}, el("td", {}, el("code", { textContent: name })), el("td", { textContent: type(property, root) }), el("td", { textContent: more }));
  };
  return el("table", {}, el("tbody", {}, ...names.map(row)));
}

/** Return a line with the media types of a response and the statuses of errors. */
function answers(responses) {
  const good = Object.keys(responses["200"]?.content ?? {}).join(" or ");
  const errors = Object.keys(responses).filter((status) => status !== "200").join(", ");
  return el("p", { textContent: [good && `Answers with ${good}.`, errors && `Errors: ${errors}.`].filter(Boolean).join(" ") });
}

function example(schema) {
  const [first] = (schema.$ref ? target(schema, api) : schema).examples ?? [];
  return first ? el("pre", {}, el("code", { textContent: JSON.stringify(first, null, 2) })) : "";
}

function route(path, method, { summary, description, requestBody, parameters = [], responses = {} }) {
  const schema = requestBody?.content?.["application/json"]?.schema;
  const head = el("summary", {}, el("b", { textContent: method.toUpperCase() }), " ", el("code", { textContent: path }), " ", el("span", { textContent: (summary ?? "").replaceAll("``", "`") }));
  const rows = parameters.map(({ name, in: place, description: text }) => el("p", {}, el("code", { textContent: name }), ` in the ${place}. ${text ?? ""}`));
  const body = schema ? fields(schema) : el("p", { textContent: parameters.length ? "" : "It has no parameters and no body." });
  const more = description && description !== summary ? el("p", { textContent: description }) : null;
  return el("details", { className: "part" }, head, more, ...rows, body, schema ? example(schema) : "", answers(responses));
}

let api = {};
try {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`the server answers with status ${response.status}`);
  api = await response.json();
  const all = Object.entries(api.paths).flatMap(([path, item]) => METHODS.filter((method) => item[method]).map((method) => route(path, method, item[method])));
  $("routes").replaceChildren(el("p", { className: "hint", textContent: `${api.info.title} ${api.info.version}, ${all.length} routes` }), ...all);
} catch (error) {
  $("routes").replaceChildren(el("p", { className: "error", textContent: `openapi.json cannot be shown: ${error.message}.` }));
}
