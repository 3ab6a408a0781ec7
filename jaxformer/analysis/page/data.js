// What the page was given: facts of the maps, and their weights a byte each.
const facts = JSON.parse(document.getElementById("facts").textContent);
let bytes = new Uint8Array(0);

async function unpack() {
  const text = atob(document.getElementById("weights").textContent.trim());
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  bytes = new Uint8Array(await new Response(stream).arrayBuffer());
}

// Where the weights of a row begin: those of its columns follow each other.
function rowStart(map, layer, head, row) {
  return map.offset + ((layer * map.heads.length + head) * map.rows.length + row) * map.columns.length;
}

// From a byte to the weight, and to its strength in [-1, 1] by which it is drawn. Distributions have the scale 0.
function asWeight(map, layer, head, byte) {
  return asStrength(map, layer, head, byte) * (map.scales[layer][head] || 1);
}

function asStrength(map, layer, head, byte) {
  return map.scales[layer][head] ? (byte - 128) / 127 : byte / 255;
}

const areDistributions = (map, layer, heads) => heads.every((head) => !map.scales[layer][head]);

function weightOf(map, layer, head, row, column) {
  return asWeight(map, layer, head, bytes[rowStart(map, layer, head, row) + column]);
}

// The mean over heads of the weights of one row for all columns, or of one column for all rows.
function meanWeights(map, layer, heads, row, column) {
  const count = row === null ? map.rows.length : map.columns.length;
  const sums = new Float64Array(count);
  for (const head of heads) {
    for (let i = 0; i < count; i++) {
      sums[i] += row === null ? weightOf(map, layer, head, i, column) : weightOf(map, layer, head, row, i);
    }
  }
  return sums.map((sum) => sum / heads.length);
}

const SEEN = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };

// A token's text with what can't be seen made visible; letters of all scripts stay as they are.
function visible(text) {
  if (text === "") return "∅";
  return text
    .replace(/^[ ]+|[ ]+$|[\n\r\t\u00a0]/g, (blanks) => [...blanks].map((blank) => SEEN[blank]).join(""))
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (sign) =>
      "U+" + sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"));
}

// The same as an element, with those signs paler than the text.
function spelled(text, attributes = {}) {
  const pieces = visible(text).split(/([␣⏎␍⇥⍽∅]+)/).filter(Boolean);
  return element("bdi", attributes, ...pieces.map((piece) => (/^[␣⏎␍⇥⍽∅]/.test(piece) ? element("span", { class: "unseen" }, piece) : piece)));
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("--")) made.style.setProperty(key, value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
