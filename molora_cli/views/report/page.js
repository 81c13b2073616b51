// The page: one section per question, in each a column per trace.

function choice(id, label, options, act) {
  const select = el('select', { id }, options.map(([value, text]) => el('option', { value }, text)));
  select.addEventListener('change', () => act(select.value));
  return el('span', { class: 'pair' }, el('label', { for: id }, label), select);
}

function section(title, note, columns) {
  const id = title.toLowerCase().replace(/[^a-z]+/g, '-');
  return el('section', { class: 'part', 'aria-labelledby': id }, el('h2', { id }, title), note && el('p', { class: 'note' }, note),
    el('div', { class: columns.length > 1 ? 'sides two' : 'sides' }, columns.map((c) => el('div', { class: 'side' }, c))));
}

// what depends on the group of layers is drawn again when another is chosen
class Figures {
  constructor(side) {
    this.side = side;
    this.drawn = [];
    this.group = 0;
  }

  add(draw) {
    const box = el('div', {});
    this.drawn.push(() => box.replaceChildren(...[draw(this.side, this.side.stats.groups[this.group])].flat()));
    this.drawn[this.drawn.length - 1]();
    return box;
  }

  chooser() {
    if (this.side.groups.length === 1) return null;
    return choice(`group-${this.side.index}`, 'Layers of the figures below',
      this.side.groups.map((layers, g) => [String(g), layers]), (value) => {
        this.group = Number(value);
        for (const draw of this.drawn) draw();
      });
  }
}

function heatColumn(side) {
  if (side.groups.length === 1) return [el('p', { class: 'none' }, 'One route holds for all layers.')];
  const box = el('div', {}, heatFigure(side, null));
  const names = side.stats.groups[0].domains.map(partName);
  const chooser = names.length < 2 ? null : choice(`heat-${side.index}`, 'Texts of',
    [['', 'every domain'], ...names.map((name, i) => [String(i), name])],
    (value) => box.replaceChildren(heatFigure(side, value === '' ? null : Number(value))));
  return [chooser && el('div', { class: 'controls' }, chooser), box];
}

function legend(side) {
  const shares = side.stats.groups[0].total.share;
  const items = side.shown().map((c) => el('li', {}, side.label(c),
    side.groups.length === 1 ? ` ${percent(shares[c])}` : ''));
  return el('ul', { class: 'legend', 'aria-label': 'Adapters' }, items);
}

function textNote(sides, same) {
  const notes = ['The tint is the adapter with the largest gate, paler where that gate is smaller.'];
  if (sides.some((s) => s.bits)) notes.push('Tokens of the chat template have a line in place of a tint.');
  for (const s of sides) {
    if (s.groups.length > 1 && s.detailed < s.tokens) {
      notes.push(`${sides.length > 1 ? `${s.name}: e` : 'E'}very layer is kept for ${number(s.detailed)} of `
        + `${plural(s.tokens, 'token')}; of the others only the sum over the layers.`);
    }
  }
  if (same) notes.push('A dotted line marks tokens on which the two differ, by name.');
  return notes.join(' ');
}

function options(root) {
  const theme = choice('theme', 'Colours', [['light dark', 'as the system'], ['light', 'light'], ['dark', 'dark']],
    (value) => { root.style.colorScheme = value; });
  const letters = el('input', { type: 'checkbox', id: 'letters' });
  letters.addEventListener('change', () => root.classList.toggle('letters', letters.checked));
  return el('div', { class: 'controls' }, theme,
    el('span', { class: 'pair' }, letters, el('label', { for: 'letters' }, 'Letters in the text')));
}

function build(data) {
  const sides = data.sides.map((side, index) => new Side(side, index));
  const same = Boolean(data.compare && data.compare.same_text);
  const detail = new Detail();
  const texts = sides.map((side) => new TextView(side, detail));
  if (same) {
    [texts[0].peer, texts[1].peer] = [texts[1], texts[0]];
    for (const view of texts) view.draw();
  }
  const figures = sides.map((side) => new Figures(side));
  const each = (draw) => figures.map((f) => f.add(draw));
  const warnings = sides.flatMap((s) => s.warnings.map((w) => (sides.length > 1 ? `${s.name}: ${w}` : w)));
  const k = Math.max(...sides.map((s) => s.k));

  document.getElementById('top').append(
    el('h1', {}, 'Where the tokens go'),
    el('div', { class: sides.length > 1 ? 'sides two' : 'sides' }, sides.map((side) => el('div', { class: 'side' },
      el('p', { class: 'name' }, side.name), el('p', {}, sample(side)), legend(side)))),
    warnings.length ? el('ul', { class: 'warnings', 'aria-label': 'Warnings' }, warnings.map((w) => el('li', {}, w))) : '',
    options(document.documentElement));

  const main = document.getElementById('main');
  main.replaceChildren(
    section('Shares', `Tokens by the adapter with the largest gate${k > 1 ? ', and the mean gate' : ''}. The line is the `
      + `uniform share: ${sides.map((s) => `1 of ${s.stats.experts}`).filter((t, i, a) => a.indexOf(t) === i).join(', ')}. `
      + 'A share says what the router chose, not what an adapter knows.',
    figures.map((f) => [el('div', { class: 'controls' }, f.chooser()), f.add(sharesFigure)])),
    section('Text', textNote(sides, same), texts.map((view) => view.node)),
    ...(data.compare ? [section('Agreement', null, [same ? agreementFigure(sides[0], sides[1], data.compare)
      : el('p', { class: 'none' }, 'The two traces are of different texts, so no token can be compared with another.')])] : []),
    ...(sides.some((s) => s.groups.length > 1)
      ? [section('Layers', null, sides.map(heatColumn))] : []),
    section('Numbers', null, each(numbersFigure)),
    section('Positions', null, each(positionFigure)),
    section('Transitions', null, each(transitionFigure)),
    ...['Entropy', 'Margin'].filter((kind) => sides.some((s) => s.stats.groups[0].total[kind.toLowerCase()]))
      .map((kind) => section(kind, kind === 'Entropy'
        ? 'Of the scores of a token: 0 is one expert alone, the right end all experts alike.'
        : 'Best score minus second best: 1 is one expert alone, 0 a tie.',
      each((side, group) => distributionFigure(side, group, kind.toLowerCase())))),
    section('Tokens taken more than the share says', 'How many of its occurrences went to the adapter. A token that is '
      + 'rare is drawn towards the share, so that a few chance hits do not lead.', each(topTokensFigure)),
    section('Source', null, sides.map(factsFigure)));
  const text = document.getElementById('text').parentElement;
  text.classList.add('with-detail');
  text.append(detail.node);
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') detail.clear();
  });
  document.getElementById('foot').append(el('p', {}, `molora ${data.version}. This page is one file and asks no server.`));
  document.documentElement.dataset.ready = Math.round(performance.now());
}

build(JSON.parse(document.getElementById('data').textContent));
