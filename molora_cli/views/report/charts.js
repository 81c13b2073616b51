// Every figure is a table with its numbers in it, so it reads without sight of its colours.

function table(caption, head, rows, kind) {
  return el(
    'div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption },
    el('table', { class: kind },
      el('caption', {}, caption),
      head && el('thead', {}, el('tr', {}, head.map((h) => el('th', { scope: 'col' }, h)))),
      el('tbody', {}, rows.map((r) => el('tr', {}, r)))));
}

const rowHead = (...content) => el('th', { scope: 'row' }, ...content);
const cell = (text, kind) => el('td', { class: kind || 'num' }, text);

function parts(group) {
  return group.domains.length > 1 ? [...group.domains, group.total] : group.domains.length ? group.domains : [group.total];
}

const partName = (part) => (part.whole ? 'all text' : part.name === null ? 'other text' : part.name);

function sharesFigure(side, group) {
  const uniform = side.stats.uniform;
  return el('div', { class: 'blocks' }, parts(group).map((part) => table(
    `${partName(part)}: ${plural(part.tokens, 'token')}, ${plural(part.documents, 'text')}`, null,
    side.shown().map((c) => {
      const track = el('div', { class: 'track' },
        sized(el('div', { class: `fill ${side.tint(c)}` }), 'width', 100 * part.share[c]),
        sized(el('div', { class: 'uniform' }), 'left', 100 * uniform));
      const mass = side.k > 1 ? [cell(`gate ${part.mass[c].toFixed(2)}`)] : [];
      return [rowHead(side.label(c)), el('td', { class: 'wide' }, track), cell(percent(part.share[c], 1)), ...mass];
    }), 'bars')));
}

function heatCell(value, text, title) {
  return el('td', { class: `heat q${Math.round(10 * Math.min(1, value))}`, title }, text);
}

// domain: its number; null for all text
function heatFigure(side, domain) {
  const columns = side.shown();
  const part = (group) => (domain === null ? group.total : group.domains[domain]);
  return table(
    `Share of tokens by first choice, in %, for ${partName(part(side.stats.groups[0]))}: one row per group of layers`,
    ['layers', ...columns.map((c) => side.label(c)), 'switches', 'margin'],
    side.stats.groups.map((group, g) => {
      const p = part(group);
      return [
        rowHead(side.groups[g]),
        ...columns.map((c) => heatCell(p.share[c], (100 * p.share[c]).toFixed(0), side.names[c])),
        cell(p.switch_rate === null ? '' : p.switch_rate.toFixed(1)),
        cell(p.margin ? p.margin.mean.toFixed(2) : ''),
      ];
    }), 'heatmap');
}

function stacked(side, shares) {
  const spoken = [];
  const bar = el('div', { class: 'stack', 'aria-hidden': 'true' });
  for (const c of side.shown()) {
    if (shares[c] <= 0) continue;
    spoken.push(`${side.names[c]} ${percent(shares[c])}`);
    const segment = el('div', { class: side.tint(c), title: spoken[spoken.length - 1] },
      shares[c] > 0.04 ? side.letters[c] : '');
    bar.append(sized(segment, 'width', 100 * shares[c]));
  }
  return el('td', { class: 'wide' }, bar, hidden(spoken.join(', ')));
}

function positionFigure(side, group) {
  return table('Share of tokens by first choice, by place in the text; the first token is 1',
    ['tokens of a text', 'share', 'sample'],
    group.positions.map((shares, bin) => {
      const from = 2 ** bin;
      const to = 2 ** (bin + 1) - 1;
      return [rowHead(from === to ? `${from}` : `${number(from)}–${number(to)}`), stacked(side, shares),
        cell(number(group.position_tokens[bin]))];
    }), 'positions');
}

function transitionFigure(side, group) {
  const columns = side.shown();
  return table('Of 100 tokens that follow a token of the row, how many take the column',
    ['after', ...columns.map((c) => side.label(c)), 'sample'],
    columns.map((from) => {
      const row = group.transitions[from];
      const sum = row.reduce((a, b) => a + b, 0);
      return [rowHead(side.label(from)),
        ...columns.map((to) => heatCell(sum ? row[to] / sum : 0, sum ? (100 * row[to] / sum).toFixed(0) : '',
          `${number(row[to])} of ${number(sum)}`)), cell(number(sum))];
    }), 'heatmap');
}

// kind: 'entropy' or 'margin'
function distributionFigure(side, group, kind) {
  const unit = kind === 'entropy' ? ' bits' : '';
  return el('div', { class: 'distributions' }, parts(group).filter((p) => p[kind]).map((part) => {
    const s = part[kind];
    const most = Math.max(...s.bins);
    const words = `${partName(part)}: mean ${s.mean.toFixed(2)}${unit}, lowest tenth up to ${s.p10.toFixed(2)}, `
      + `half up to ${s.p50.toFixed(2)}, nine tenths up to ${s.p90.toFixed(2)}; ${plural(part.tokens, 'token')}`;
    const bars = s.bins.map((count, b) => sized(
      el('div', { class: count ? 'bar' : 'bar none', title: `${number(count)} tokens from `
        + `${(b * s.limit / s.bins.length).toFixed(2)} to ${((b + 1) * s.limit / s.bins.length).toFixed(2)}` }),
      'height', 100 * count / most));
    return el('figure', {},
      el('div', { class: 'columns', role: 'img', 'aria-label': `${kind}, ${words}` }, bars),
      el('div', { class: 'axis', 'aria-hidden': 'true' }, el('span', {}, '0'), el('span', {}, kind + (unit && ', bits')),
        el('span', {}, s.limit.toFixed(s.limit === 1 ? 0 : 2))),
      el('figcaption', {}, words));
  }));
}

function numbersFigure(side, group) {
  const scored = group.total.entropy !== null;
  const head = ['', 'tokens', 'texts', 'switches', ...(scored ? ['entropy', 'margin', 'margin, lowest tenth'] : [])];
  return table('Switches per 100 neighbouring tokens; entropy of the scores in bits; margin of the best score over '
    + 'the second, means', head, parts(group).map((p) => [
    rowHead(partName(p)), cell(number(p.tokens)), cell(number(p.documents)),
    cell(p.switch_rate === null ? '' : p.switch_rate.toFixed(1)),
    ...(scored ? [p.entropy && p.entropy.mean, p.margin && p.margin.mean, p.margin && p.margin.p10]
      .map((v) => cell(v === null ? '' : v.toFixed(2))) : []),
  ]), 'numbers');
}

function visible(text) {
  return text.replace(/⏎?\n/g, '⏎').replace(/\t/g, '⇥').replace(/ /g, '␣');
}

function topTokensFigure(side, group) {
  const rows = [];
  group.top_tokens.forEach((tokens, c) => {
    if (!tokens.length) return;
    rows.push(el('div', {}, el('h4', {}, side.label(c)),
      el('ul', { class: 'tokens' }, tokens.map((t) => el('li', { title: `token id ${t.token}` },
        el('code', {}, visible(t.text)), ` ${number(Math.round(t.taken))} of ${number(t.count)}`)))));
  });
  return rows.length ? el('div', { class: 'tops' }, rows)
    : el('p', { class: 'none' }, 'No token is taken more often than the shares say (three occurrences or more).');
}

function agreementFigure(a, b, compare) {
  const columns = b.shown();
  const rows = a.shown();
  return [
    el('p', {}, `Both route the same ${plural(compare.tokens, 'token')}. The expert of the largest gate has the same `
      + `name for ${percent(compare.tokens ? compare.agreed / compare.tokens : 0, 1)} of them.`),
    table(`Tokens by their expert: rows ${a.name}, columns ${b.name}`,
      ['', ...columns.map((c) => b.label(c)), 'tokens'],
      rows.map((r) => {
        const sum = compare.matrix[r].reduce((x, y) => x + y, 0);
        return [rowHead(a.label(r)), ...columns.map((c) => heatCell(sum ? compare.matrix[r][c] / sum : 0,
          number(compare.matrix[r][c]), `${number(compare.matrix[r][c])} of ${number(sum)}`)), cell(number(sum))];
      }), 'heatmap'),
  ];
}

function factsFigure(side) {
  const list = el('dl', {});
  for (const [name, value] of side.facts) list.append(el('dt', {}, name), el('dd', {}, value));
  list.append(el('dt', {}, 'sample'), el('dd', {}, sample(side)));
  const found = [list];
  if (side.adapters) {
    found.push(table('Adapters of the bundle', ['adapter', 'rank', 'modules', 'scale', 'parameters', 'licence', 'source'],
      side.adapters.map((a) => [rowHead(a.name), cell(Object.keys(a.ranks).join(' ')), cell(number(a.modules)),
        cell(a.scales.map((s) => +s.toPrecision(4)).join(' ')), cell(number(a.parameters)),
        cell(a.licence || 'not stated', 'left'), cell(a.source, 'left')]), 'numbers'));
  }
  return found;
}

function sample(side) {
  const s = side.stats;
  const texts = plural(side.starts.length, 'text');
  const template = s.template_tokens
    ? `; the chat template's ${number(s.template_tokens)} are ${s.template_counted ? 'counted too' : 'not counted'}` : '';
  return `${plural(side.tokens, 'token')} in ${texts}${template}`;
}
