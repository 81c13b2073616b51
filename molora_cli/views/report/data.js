// Elements, arrays and numbers. Text from outside only ever becomes a text node.

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array };

function decode(array) {
  const text = atob(array.d);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new TYPES[array.t](bytes.buffer);
}

// el('td', {class: 'num', scope: 'row'}, child or string, ...)
function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

// the class names set the size and the colour; style is set through the object, which the policy allows
function sized(node, property, percent) {
  node.style[property] = `${percent.toFixed(2)}%`;
  return node;
}

const number = (value) => value.toLocaleString('en');
const percent = (value, digits) => `${(100 * value).toFixed(digits || 0)} %`;
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? '' : 's'}`;
const hidden = (text) => el('span', { class: 'sr' }, text);

class Side {
  constructor(data, index) {
    Object.assign(this, data);
    this.index = index;
    this.base = data.names.length - 1;
    for (const name of ['starts', 'domain', 'text', 'ids']) this[name] = decode(data[name]);
    this.bits = data.template && decode(data.template);
    this.overall = data.overall && { columns: decode(data.overall.columns), gates: decode(data.overall.gates) };
    const d = data.detail;
    this.columns = decode(d.columns);
    this.gates = decode(d.gates);
    this.margins = d.margins && decode(d.margins);
    this.scored = d.scores && { kept: d.scores.kept, columns: decode(d.scores.columns), p: decode(d.scores.p) };
    this.detailed = this.ranges.reduce((sum, [start, end]) => sum + end - start, 0);
  }

  // columns that can be taken at all
  shown() {
    return this.names.map((_, i) => i).filter((i) => i !== this.base || this.stats.knows_base);
  }

  // the place of token i in the detailed arrays, or -1
  place(i) {
    let before = 0;
    for (const [start, end] of this.ranges) {
      if (i < start) return -1;
      if (i < end) return before + i - start;
      before += end - start;
    }
    return -1;
  }

  // [{column, gate}] of token i in one group, the largest gate first; null where it was not kept
  choices(i, group) {
    const place = this.place(i);
    if (place < 0) return null;
    const from = (place * this.groups.length + group) * this.kept;
    const found = [];
    for (let c = from; c < from + this.kept; c++) {
      found.push({ column: this.columns[c], gate: this.gates[c] / 255 });
    }
    return found;
  }

  margin(i, group) {
    if (this.scored) {
      const [best, second] = this.scores(i);
      return best.p - second.p;
    }
    const place = this.place(i);
    return place < 0 || !this.margins ? null : this.margins[place * this.groups.length + group] / 255;
  }

  scores(i) {
    if (!this.scored) return [];
    const { kept, columns, p } = this.scored;
    const from = this.place(i) * kept;
    return Array.from({ length: kept }, (_, s) => ({ column: columns[from + s], p: p[from + s] / 255 }));
  }

  // what a token is coloured by: {column, gate}, in one group, or over all (group < 0)
  first(i, group) {
    if (group < 0 && this.overall) {
      return { column: this.overall.columns[i], gate: this.overall.gates[i] / 255 };
    }
    const found = this.choices(i, Math.max(0, group));
    return found && found[0];
  }

  ofTemplate(i) {
    return this.bits !== null && ((this.bits[i >> 3] >> (i & 7)) & 1) === 1;
  }

  words(i) {
    return this.texts[this.text[i]];
  }

  documentOf(i) {
    let low = 0;
    let high = this.starts.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= i) low = middle;
      else high = middle;
    }
    // texts without a token share their start with the one that follows
    while (low + 1 < this.starts.length && this.starts[low + 1] <= i) low += 1;
    return low;
  }

  end(document) {
    return document + 1 < this.starts.length ? this.starts[document + 1] : this.tokens;
  }

  domainName(document) {
    const index = this.domain.length ? this.domain[document] : -1;
    return index < 0 ? null : this.domains[index];
  }

  // classes of a tint: hue and step of the gate; marks from the eighth adapter on
  tint(column, gate) {
    if (column === this.base) return 'base';
    const turn = Math.floor(column / 7);
    const marks = `${turn & 1 ? ' u' : ''}${turn & 2 ? ' i' : ''}`;
    return `h${column % 7} s${Math.round(Math.min(1, gate === undefined ? 1 : gate) * 4)}${marks}`;
  }

  chip(column, gate) {
    return el('span', { class: `chip ${this.tint(column, gate)}`, 'aria-hidden': 'true' }, this.letters[column]);
  }

  label(column) {
    return el('span', { class: 'label' }, this.chip(column), ' ', this.names[column]);
  }
}
