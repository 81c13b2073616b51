// The panel that tells a token's route: every choice with its gate, the best scores, the margin, every layer.

class Detail {
  constructor() {
    this.node = el('aside', { class: 'detail', 'aria-label': 'The token under the pointer', tabindex: '-1' });
    this.pinned = false;
    this.clear();
  }

  clear() {
    this.pinned = false;
    this.node.classList.remove('pinned');
    this.node.replaceChildren(el('p', { class: 'none' },
      'Point at a token, tap it, or move to it with Tab and the arrow keys, to see its route. Enter or a click keeps '
      + 'it, Escape lets go.'));
  }

  // tokens: [[side, i], ...], one for each trace that holds it
  show(tokens, pin) {
    this.pinned = pin;
    this.node.classList.toggle('pinned', pin);
    this.node.replaceChildren(...tokens.map(([side, i]) => this.one(side, i, tokens.length > 1)));
  }

  one(side, i, named) {
    const document = side.documentOf(i);
    const domain = side.domainName(document);
    const words = side.words(i);
    const node = el('section', {},
      named && el('h3', {}, side.name),
      el('p', { class: 'word' }, el('code', {}, words ? visible(words) : '(part of a letter)')),
      el('p', { class: 'where' }, `id ${side.ids[side.text[i]]}, token ${number(i - side.starts[document] + 1)} of `
        + `text ${number(document + 1)}${domain ? `, ${domain}` : ''}`
        + `${side.ofTemplate(i) ? ', added by the chat template' : ''}`));
    if (side.groups.length > 1) {
      const first = side.first(i, -1);
      node.append(el('p', {}, side.label(first.column), ` has the largest sum of gates: ${first.gate.toFixed(2)} of 1 `
        + 'over all layers.'));
      node.append(side.place(i) < 0
        ? el('p', { class: 'none' }, `Every layer is kept for ${plural(side.detailed, 'token')}; not for this one.`)
        : this.layers(side, i));
      return node;
    }
    node.append(this.chosen(side, i));
    const scores = side.scores(i);
    if (scores.length) {
      node.append(el('table', { class: 'small' },
        el('caption', {}, `Best ${scores.length} of ${side.stats.experts} scores`),
        el('tbody', {}, scores.map((s) => el('tr', {}, rowHead(side.label(s.column)), cell(s.p.toFixed(2)))))));
    }
    const margin = side.margin(i, 0);
    if (margin !== null) node.append(el('p', {}, `Margin of the best over the second: ${margin.toFixed(2)}`));
    return node;
  }

  chosen(side, i) {
    const kept = side.choices(i, 0);
    return el('table', { class: 'small' },
      el('caption', {}, side.k > side.kept ? `The ${side.kept} largest of ${side.k} gates` : `Top ${side.k}`),
      el('tbody', {}, kept.map((c) => el('tr', {}, rowHead(side.label(c.column)),
        cell(c.column === side.base && side.k === 1 ? 'no adapter' : c.gate.toFixed(2))))));
  }

  layers(side, i) {
    const rows = side.groups.map((layers, g) => {
      const chips = side.choices(i, g).map((c) => [el('span', { class: 'label' }, side.chip(c.column, c.gate),
        ` ${side.names[c.column]} ${c.gate.toFixed(2)}`), ' ']);
      const margin = side.margin(i, g);
      return el('tr', {}, rowHead(layers), el('td', { class: 'left' }, chips.flat()),
        margin === null ? null : cell(margin.toFixed(2)));
    });
    const head = ['layers', side.kept > 1 ? 'choices, gate' : 'choice, gate', ...(side.margins ? ['margin'] : [])];
    return el('table', { class: 'small' }, el('caption', {}, 'Every group of layers'),
      el('thead', {}, el('tr', {}, head.map((h) => el('th', { scope: 'col' }, h)))), el('tbody', {}, rows));
  }
}
