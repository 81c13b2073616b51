// The coloured text, a page of it at a time: only the tokens of one page are elements, however long the trace.

const PAGE = 2000;

class TextView {
  constructor(side, detail) {
    this.side = side;
    this.detail = detail;
    this.peer = null; // the view of the other trace, where both hold the same tokens
    this.group = -1;
    this.filter = null;
    this.number = 0;
    this.status = el('span', { class: 'status', role: 'status' });
    this.body = el('div', { class: 'text' });
    this.node = el('div', {}, this.controls(), this.body);
    this.body.addEventListener('pointerover', (event) => this.look(event.target, false));
    this.body.addEventListener('pointerleave', () => this.away());
    this.body.addEventListener('focusin', (event) => this.look(event.target, false));
    this.body.addEventListener('click', (event) => this.look(event.target, true));
    this.body.addEventListener('keydown', (event) => this.key(event));
    this.paginate();
  }

  controls() {
    const { side } = this;
    const id = (name) => `${name}-${side.index}`;
    const button = (text, act) => {
      const node = el('button', { type: 'button' }, text);
      node.addEventListener('click', act);
      return node;
    };
    const bar = el('div', { class: 'controls' });
    if (side.groups.length > 1) {
      bar.append(choice(id('layers'), 'Colour by layers', [['-1', 'all together'],
        ...side.groups.map((layers, g) => [String(g), layers])], (value) => {
        this.group = Number(value);
        this.draw();
      }));
    }
    if (side.domains.length > 1) {
      bar.append(choice(id('domain'), 'Texts of', [['', 'every domain'],
        ...side.domains.map((name, d) => [String(d), name])], (value) => {
        this.filter = value === '' ? null : Number(value);
        this.paginate();
      }));
    }
    this.previous = button('Previous', () => this.turn(this.number - 1));
    this.next = button('Next', () => this.turn(this.number + 1));
    const field = el('input', { type: 'search', id: id('find') });
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Enter') this.find(field.value);
    });
    bar.append(el('span', { class: 'pair' }, this.previous, this.next, this.status),
      el('span', { class: 'pair' }, el('label', { for: id('find') }, 'Find'), field,
        button('Find next', () => this.find(field.value))));
    return bar;
  }

  // pages: lists of [document, from, to] with at most PAGE tokens together
  paginate() {
    const { side } = this;
    this.pages = [];
    let page = [];
    let room = PAGE;
    for (let d = 0; d < side.starts.length; d++) {
      if (this.filter !== null && side.domain[d] !== this.filter) continue;
      const end = side.end(d);
      for (let from = side.starts[d]; from < end;) {
        const to = Math.min(end, from + room);
        page.push([d, from, to]);
        room -= to - from;
        from = to;
        if (room === 0) {
          this.pages.push(page);
          page = [];
          room = PAGE;
        }
      }
    }
    if (page.length) this.pages.push(page);
    this.number = 0;
    this.draw();
  }

  turn(number, from) {
    this.number = Math.max(0, Math.min(this.pages.length - 1, number));
    this.draw();
    // two views of one text turn together
    if (this.peer && this.peer !== from && this.peer.filter === this.filter) this.peer.turn(this.number, this);
  }

  draw() {
    const page = this.pages[this.number] || [];
    this.previous.disabled = this.number <= 0;
    this.next.disabled = this.number >= this.pages.length - 1;
    this.status.textContent = this.pages.length ? `page ${number(this.number + 1)} of ${number(this.pages.length)}` : '';
    this.tokens = [];
    this.body.replaceChildren(...page.map((part) => this.passage(part)));
    if (!page.length) this.body.append(el('p', { class: 'none' }, 'There is no token.'));
    if (this.tokens.length) this.tokens[0].tabIndex = 0;
  }

  passage([document, from, to]) {
    const { side } = this;
    const start = side.starts[document];
    const whole = from === start && to === side.end(document);
    const name = side.domainName(document);
    const title = `${name ? `${name}, ` : ''}text ${number(document + 1)}, ${whole ? plural(to - from, 'token')
      : `tokens ${number(from - start + 1)} to ${number(to - start)} of ${number(side.end(document) - start)}`}`;
    const box = el('div', { class: 'passage', role: 'listbox', 'aria-label': title });
    let previous = -1;
    for (let i = from; i < to; i++) {
      const words = side.words(i);
      if (!words) continue;
      box.append(this.token(i, words, previous));
      const first = side.first(i, this.group);
      previous = first ? first.column : -1;
    }
    return el('section', {}, el('h3', {}, title), box);
  }

  token(i, words, previous) {
    const { side } = this;
    const first = side.first(i, this.group);
    let kind = first ? side.tint(first.column, first.gate) : 'unknown';
    if (side.ofTemplate(i)) kind += ' template';
    if (this.peer && this.differs(i)) kind += ' differs';
    const node = document.createElement('span');
    node.className = kind;
    node.tabIndex = -1;
    node.setAttribute('role', 'option');
    node.dataset.i = i;
    if (first && first.column !== previous) {
      // where the adapter changes: the letter that print and forced colours show, after blanks as in a terminal
      const body = words.trimStart();
      node.append(words.slice(0, words.length - body.length),
        el('span', { class: 'letter', 'data-letter': side.letters[first.column] }), body);
    } else {
      node.textContent = words;
    }
    this.tokens.push(node);
    return node;
  }

  differs(i) {
    const [mine, theirs] = [this, this.peer].map(({ side }) => side.names[side.first(i, -1).column]);
    return mine !== theirs;
  }

  look(target, pin) {
    const token = target.closest('[data-i]');
    if (!token || (this.detail.pinned && !pin)) return;
    const i = Number(token.dataset.i);
    const views = this.peer ? [this, this.peer].sort((a, b) => a.side.index - b.side.index) : [this];
    this.detail.show(views.map((view) => [view.side, i]), pin);
    for (const view of views) view.mark(i, pin);
  }

  mark(i, pin) {
    for (const node of this.body.querySelectorAll('[aria-selected]')) node.removeAttribute('aria-selected');
    const node = this.body.querySelector(`[data-i="${i}"]`);
    if (node) node.setAttribute('aria-selected', pin ? 'true' : 'false');
  }

  away() {
    if (!this.detail.pinned && !this.body.contains(document.activeElement)) this.detail.clear();
  }

  key(event) {
    const at = this.tokens.indexOf(event.target);
    if (at < 0) return;
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.tokens.length - 1 };
    if (event.key === 'Enter' || event.key === ' ') this.look(event.target, true);
    else if (event.key === 'Escape') this.detail.clear();
    else if (event.key === 'ArrowDown' || event.key === 'ArrowUp') this.focus(this.beside(at, event.key === 'ArrowDown'));
    else if (event.key in moves) this.focus(moves[event.key]);
    else return;
    event.preventDefault();
  }

  // the token on the next or previous line that lies closest below or above
  beside(at, down) {
    const here = this.tokens[at].getBoundingClientRect();
    const step = down ? 1 : -1;
    let best = at;
    let line = null;
    let distance = Infinity;
    for (let t = at + step; t >= 0 && t < this.tokens.length; t += step) {
      const box = this.tokens[t].getBoundingClientRect();
      if (Math.abs(box.top - here.top) < here.height / 2) continue;
      if (line === null) line = box.top;
      if (Math.abs(box.top - line) > here.height / 2) break;
      const far = Math.abs(box.left - here.left);
      if (far < distance) [best, distance] = [t, far];
    }
    return best;
  }

  focus(at) {
    const node = this.tokens[Math.max(0, Math.min(this.tokens.length - 1, at))];
    for (const other of this.body.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    node.tabIndex = 0;
    this.detail.pinned = false;
    node.focus();
  }

  // the next token, after the one that was found last, whose text begins what is looked for
  find(wanted) {
    if (!wanted) return;
    const after = this.found === undefined || this.wanted !== wanted ? -1 : this.found;
    this.wanted = wanted;
    for (let n = 0; n < this.pages.length; n++) {
      for (const [, from, to] of this.pages[n]) {
        const i = to <= after + 1 ? -1 : this.search(wanted.toLowerCase(), Math.max(from, after + 1), to);
        if (i < 0) continue;
        this.found = i;
        this.turn(n);
        this.focus(this.tokens.findIndex((node) => Number(node.dataset.i) === i));
        return;
      }
    }
    this.status.textContent = after < 0 ? 'not found' : 'no more; from the start with the next search';
    this.found = undefined;
  }

  search(wanted, from, to) {
    const ends = [];
    let text = '';
    for (let i = from; i < to; i++) {
      text += this.side.words(i).replace(/⏎\n/g, '\n').toLowerCase();
      ends.push(text.length);
    }
    const at = text.indexOf(wanted);
    return at < 0 ? -1 : from + ends.findIndex((end) => end > at);
  }
}
