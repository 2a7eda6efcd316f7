// The model's markdown as DOM nodes. Text only ever becomes text nodes: nothing a model writes is parsed as HTML.

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|(?<![\w*])\*(?=[^\s*])([^*\n]*?[^\s*])\*(?!\w)|(?<!\w)_(?=[^\s_])([^_\n]*?[^\s_])_(?!\w)|~~(?=\S)([\s\S]*?\S)~~|\[([^\]\n]+)\]\(\s*(https?:\/\/[^\s)]+)\s*\)|(https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?])/;
const FENCE = /^ {0,3}(```+|~~~+)\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 8;  // nested emphasis, quotes and lists beyond it stay text

export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Renders a growing text into `target`: blocks that have not changed keep their nodes.
export class Markdown {
  constructor(target) {
    this.target = target;
    this.sources = [];
  }

  show(text) {
    const blocks = split(text.split("\n"));
    let same = 0;
    while (same < blocks.length && this.sources[same] === blocks[same]) same++;
    while (this.target.childNodes.length > same) this.target.lastChild.remove();
    for (const source of blocks.slice(same)) this.target.append(block(source, 0));
    this.sources = blocks;
  }
}

// Lines to blocks: strings that `block` turns into one node each.
function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const begin = at;
    const fence = FENCE.exec(lines[at]);
    if (!lines[at].trim()) { at++; continue; }
    if (fence) {
      const close = new RegExp("^ {0,3}" + fence[1][0] + "{" + fence[1].length + ",}\\s*$");
      at++;
      while (at < lines.length && !close.test(lines[at])) at++;
      at++;
    } else if (HEADING.test(lines[at]) || RULE.test(lines[at])) at++;
    else if (QUOTE.test(lines[at])) while (at < lines.length && QUOTE.test(lines[at])) at++;
    else if (ITEM.test(lines[at])) at = endOfList(lines, at);
    else if (isTable(lines, at)) { at += 2; while (at < lines.length && lines[at].includes("|")) at++; }
    else {
      at++;
      while (at < lines.length && lines[at].trim() && !beginsBlock(lines, at)) at++;
    }
    blocks.push(lines.slice(begin, at).join("\n"));
  }
  return blocks;
}

function beginsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(lines, at);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1]);
}

function endOfList(lines, at) {
  const indent = ITEM.exec(lines[at])[1].length;
  for (at++; at < lines.length; at++) {
    if (lines[at].trim()) {
      const item = ITEM.exec(lines[at]);
      const depth = /^\s*/.exec(lines[at])[0].length;
      if (depth <= indent && !item) return at;
    } else {
      const next = lines[at + 1] ?? "";
      const further = /^\s*/.exec(next)[0].length > indent && next.trim();
      if (!further && !ITEM.test(next)) return at;
    }
  }
  return at;
}

function block(source, depth) {
  const lines = source.split("\n");
  if (FENCE.test(lines[0])) return fence(lines);
  const heading = HEADING.exec(lines[0]);
  if (heading) return element("h" + Math.min(heading[1].length, 4), "", ...inline(heading[2], depth));
  if (RULE.test(lines[0])) return element("hr");
  if (depth < DEEPEST && QUOTE.test(lines[0])) {
    const inner = lines.map((line) => QUOTE.exec(line)[1]);
    return element("blockquote", "", ...split(inner).map((part) => block(part, depth + 1)));
  }
  if (depth < DEEPEST && ITEM.test(lines[0])) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines, depth);
  return element("p", "", ...withBreaks(source, depth));
}

function fence(lines) {
  const mark = FENCE.exec(lines[0])[1];
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = element("button", "", "Copy");
  copy.type = "button";
  copy.dataset.copy = "code";
  return element("div", "fence", element("pre", "", element("code", "", text)), copy);
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const made = element(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2], 10) !== 1) made.start = parseInt(first[2], 10);
  let item = [];
  let margin = 0;
  const finish = () => {
    if (!item.length) return;
    const parts = split(item);
    const loose = parts.map((part) => {
      const node = block(part, depth + 1);
      return node.tagName === "P" ? [...node.childNodes] : [node];
    });
    made.append(element("li", "", ...loose.flat()));
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= first[1].length + 1) {
      finish();
      margin = line.length - found[3].length;
      item = [found[3]];
    } else item.push(line.slice(Math.min(margin, /^\s*/.exec(line)[0].length)));
  }
  finish();
  return made;
}

function table(lines, depth) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => element("tr", "", ...cells(line).map((cell) => element(tag, "", ...inline(cell, depth))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  return element("div", "table", element("table", "", element("thead", "", row(lines[0], "th")), element("tbody", "", ...body)));
}

function withBreaks(text, depth) {
  return text.split("\n").flatMap((line, number) => (number ? [element("br"), ...inline(line, depth)] : inline(line, depth)));
}

function inline(text, depth) {
  const nodes = [];
  while (text && depth < DEEPEST) {
    const found = INLINE.exec(text);
    if (!found) break;
    if (found.index) nodes.push(text.slice(0, found.index));
    text = text.slice(found.index + found[0].length);
    const [, , code, strong, strong2, em, em2, gone, label, target, bare] = found;
    if (code !== undefined) nodes.push(element("code", "", code.trim() || code));
    else if (strong ?? strong2) nodes.push(element("strong", "", ...inline(strong ?? strong2, depth + 1)));
    else if (em ?? em2) nodes.push(element("em", "", ...inline(em ?? em2, depth + 1)));
    else if (gone) nodes.push(element("s", "", ...inline(gone, depth + 1)));
    else nodes.push(link(label ?? bare, target ?? bare));
  }
  if (text) nodes.push(text);
  return nodes;
}

// Only http and https get here; a page that is opened learns nothing of this one.
function link(label, target) {
  const made = element("a", "", label);
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}
