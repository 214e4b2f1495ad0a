// Markdown of answers, as elements. The parser only returns tokens, of which elements are built one by one: no text is ever
// parsed as HTML, and nothing is loaded. HTML in an answer is shown as text.

import { copyButton, el } from "./dom.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "server.py" is no link
const TAGS = new Set(["p", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "strong", "em", "s", "hr", "br"]);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

/** Return an element and `show(text)`, which replaces the top-level blocks that have changed since the last call. */
export function markdownView() {
  const node = el("div", { className: "markdown" });
  let sources = [];
  let references = "";
  const show = (text) => {
    const { blocks, definitions } = blocksOf(text);
    let same = 0;
    if (definitions === references) while (same < blocks.length && blocks[same].source === sources[same]) same += 1;
    while (node.childNodes.length > same) node.lastChild.remove();
    node.append(...blocks.slice(same).map(({ tokens }) => build(tokens)));
    sources = blocks.map(({ source }) => source);
    references = definitions;
  };
  return { node, show };
}

/** Return the tokens and the source of each top-level block, and the link definitions, which concern all of them. */
function blocksOf(text) {
  const env = {};
  const lines = text.split("\n");
  const blocks = [];
  let depth = 0;
  for (const token of parser.parse(text, env)) {
    if (depth === 0) blocks.push({ tokens: [], source: `${token.type} ${lines.slice(...token.map).join("\n")}` });
    blocks.at(-1).tokens.push(token);
    depth += token.nesting;
  }
  return { blocks, definitions: JSON.stringify(env.references ?? {}) };
}

/** Return the elements of tokens. */
function build(tokens) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting < 0) {
      open.pop();
    } else if (token.hidden) {
      open.push(parent); // the paragraph of an item in a tight list
    } else if (token.nesting > 0) {
      const node = element(token);
      parent.append(token.type === "table_open" ? el("div", { className: "table", tabIndex: 0 }, node) : node);
      open.push(node);
    } else {
      parent.append(leaf(token));
    }
  }
  return root;
}

/** Return the element that a token begins. */
function element(token) {
  if (token.type === "heading_open") return el(`h${Math.min(6, Number(token.tag[1]) + 2)}`, { dir: "auto", className: token.tag }); // below those of the page
  if (token.type === "link_open") return link(token.attrGet("href"));
  if (!TAGS.has(token.tag)) return el("span");
  const node = el(token.tag);
  if (["p", "ul", "ol", "blockquote", "th", "td"].includes(token.tag)) node.dir = "auto";
  if (token.tag === "ol" && token.attrGet("start") !== null) node.start = Number(token.attrGet("start"));
  const align = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  if (align) node.className = align[1];
  return node;
}

/** Return a link to another site, or a plain element for every other target, such as scripts and routes of this server. */
function link(href) {
  let url;
  try {
    url = new URL(href);
  } catch {
    return el("span");
  }
  return SCHEMES.has(url.protocol) ? el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }) : el("span");
}

/** Return the element of a token without children, or with inline tokens. */
function leaf(token) {
  if (token.type === "inline") return build(token.children);
  if (token.type === "fence" || token.type === "code_block") return code(token);
  if (token.type === "code_inline") return el("code", { textContent: token.content });
  if (token.type === "softbreak" || token.type === "hardbreak") return el("br");
  if (token.type === "hr") return el("hr");
  if (token.type === "image") return image(token);
  return document.createTextNode(token.content);
}

/** Return the description of an image, whose address is shown but not loaded. */
function image(token) {
  const address = token.attrGet("src");
  return el("span", { className: "image", title: address }, `[Image: ${token.content || address}]`);
}

function code(token) {
  const language = token.info.trim().split(/\s+/)[0];
  const text = token.content.replace(/\n$/, "");
  const bar = el("figcaption", {}, el("span", { textContent: language || "code" }), copyButton("Copy code", text));
  const block = el("pre", { tabIndex: 0, ariaLabel: `Code ${language}`.trim(), dir: "ltr" }, el("code", { textContent: text }));
  block.setAttribute("role", "region");
  return el("figure", { className: "code-block" }, bar, block);
}
