// The viewer: reads trajectories, from files or frame by frame, and shows one frame of every arm at a time.
"use strict";
const limpet = (() => {
  const GIVEN = 1, DEFICIT = 65535, MASS = 255; // the first mark is "given"; the others are the sampler's own
  const COLOURED = ["given", "selected", "visible", "chosen", "mended"]; // marks with a look of their own; others share three
  const DEEDS = ["chosen", "mended"]; // of these, what a call did; the others say how a position stands
  const MEANS = { // what the marks with a look of their own say of a word
    given: "by the prompt, or fixed", selected: "in an earlier call, and hidden again", visible: "written down: the model sees it",
    chosen: "written down by this call", mended: "corrected by this call", changed: "another word than one call ago",
  };
  const LEVELS = 8; // of shading
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const narrow = matchMedia("(max-width: 40rem)");

  // An element. Text only ever enters as text: no string is parsed as HTML anywhere on this page.
  function make(tag, className = "", text = "") {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== "") element.textContent = text;
    return element;
  }

  function svg(tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  // Bytes

  const fromBase64 = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

  async function through(bytes, transform) {
    return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(transform)).arrayBuffer());
  }

  // A frame's bytes, as trajectory.py's Header.layout orders them. Copied, since typed arrays must be aligned.
  function unpack(header, bytes) {
    const wide = header.vocab_size > 65536, length = header.length, some = length * header.candidates;
    const Token = wide ? Uint32Array : Uint16Array;
    let start = 0;
    const take = (Kind, count) => {
      const size = count * Kind.BYTES_PER_ELEMENT;
      const part = bytes.slice(start, start + size);
      start += size;
      return new Kind(part.buffer);
    };
    return {
      t: take(Float64Array, 1)[0], state: take(Token, length), input: take(Token, length), marks: take(Uint8Array, length),
      deficit: take(Uint16Array, length), ids: take(Token, some), mass: take(Uint8Array, some),
    };
  }

  function frameBytes(header) {
    const token = header.vocab_size > 65536 ? 4 : 2;
    return 8 + header.length * (2 * token + 3 + header.candidates * (token + 1));
  }

  // Arms: what a trajectory says, and what follows from it

  function newArm(header) {
    return { header, words: new Map(), frames: [], raw: [], text: null, scores: {}, classes: [] };
  }

  const total = (arm) => arm.header.calls + 1;
  const stopped = (arm) => !state.live && (arm.frames.length < total(arm) || arm.header.calls < arm.header.sampler.nfe);
  const textOf = (arm) => arm.text ?? [...arm.frames.at(-1)?.input ?? []].map((token) => arm.words.get(token) ?? "").join("");

  // Of each sampler the colour of its family, as classes: native, top-p, CRS and Mend have their own, the others take turns;
  // and its turn among those of one colour, which shapes and dashes tell apart.
  function looksOf(samplers) {
    const rivals = [], seen = {};
    return samplers.map((sampler) => {
      const sharp = ["top_p", "late_top_p"].some((knob) => sampler[knob] != null && sampler[knob] < 1);
      let own = sampler.sampler === "native" && sharp ? "top-p" : sampler.sampler;
      if (!["native", "top-p", "crs", "mend"].includes(own)) {
        if (!rivals.includes(own)) rivals.push(own);
        own = `rival${rivals.indexOf(own) % 3}`;
      }
      seen[own] = (seen[own] ?? -1) + 1;
      return { family: own, classes: `is-${own} nth${seen[own] % 4}` };
    });
  }

  // The classes of a mark by its name, and of all the marks in a byte.
  function classOf(arm, name) {
    if (COLOURED.includes(name)) return name;
    return `other other${arm.header.marks.filter((mark) => !COLOURED.includes(mark)).indexOf(name) % 3}`;
  }

  function marksIn(arm, byte) { return arm.header.marks.filter((_, bit) => byte >> bit & 1); }

  function classesOf(arm, byte) {
    return arm.classes[byte] ??= marksIn(arm, byte).map((name) => ` ${classOf(arm, name)}`).join("");
  }

  function addFrame(arm, bytes, words) {
    for (const [token, word] of Object.entries(words)) arm.words.set(Number(token), word);
    const frame = unpack(arm.header, bytes), length = arm.header.length, r = arm.frames.length;
    const before = r ? arm.frames[r - 1] : null;
    const last = r === total(arm) - 1;
    const Token = frame.state.constructor;
    frame.guess = new Token(length);
    frame.since = new Uint16Array(length); // the frame in which the shown token came
    frame.guessSince = new Uint16Array(length);
    frame.counts = arm.header.marks.map((_, bit) => frame.marks.reduce((sum, byte) => sum + (byte >> bit & 1), 0));
    frame.changed = 0;
    let deficit = 0, free = 0;
    for (let i = 0; i < length; i++) {
      const given = frame.marks[i] & GIVEN;
      frame.guess[i] = given || last ? frame.state[i] : frame.ids[i * arm.header.candidates];
      frame.since[i] = before && before.input[i] === frame.input[i] ? before.since[i] : r;
      frame.guessSince[i] = before && before.guess[i] === frame.guess[i] ? before.guessSince[i] : r;
      if (r && frame.since[i] === r) frame.changed++;
      if (!given) { free++; deficit += frame.deficit[i]; }
    }
    frame.meanDeficit = last ? null : deficit / DEFICIT / Math.max(1, free);
    arm.raw.push(bytes);
    arm.frames.push(frame);
  }

  async function readFile(base64) {
    const bytes = await through(fromBase64(base64), new DecompressionStream("gzip"));
    const end = bytes.indexOf(10);
    const { words, text, scores, ...header } = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
    const arm = newArm(header), size = frameBytes(header);
    for (let start = end + 1; start < bytes.length; start += size) {
      addFrame(arm, bytes.subarray(start, start + size), start === end + 1 ? words : {});
    }
    return Object.assign(arm, { text, scores });
  }

  async function fileOf(arm) {
    const words = Object.fromEntries([...arm.words].sort((a, b) => a[0] - b[0]));
    const { format, version, ...rest } = arm.header;
    const calls = Math.min(arm.header.calls, arm.frames.length - 1); // of a run that was stopped, what came
    const about = { format, version, ...rest, calls, text: arm.text, scores: arm.scores, words };
    const line = new TextEncoder().encode(JSON.stringify(about) + "\n");
    return through(new Blob([line, ...arm.raw]), new CompressionStream("gzip"));
  }

  function download(name, content, type) {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name.replace(/[^\w.-]+/g, "-");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // Words as they are shown: every token takes some room, and a line break can be seen.
  const visibleWord = (word) =>
    (word === "" ? "·" : word).replace(/\n/g, "↵\n").replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "␣");
  const flatWord = (word) => visibleWord(word).replace(/\n/g, "");

  const state = {
    arms: [], views: [], at: 0, follow: true, live: false, timer: null, hovered: null, pinned: null, anchor: null,
    show: "input", colour: "confidence", fix: null, // what holds a word from now on, where something can
  };

  const frames = () => Math.max(1, ...state.arms.map(total));
  const arrived = () => Math.max(0, ...state.arms.map((arm) => arm.frames.length));
  const frameAt = (arm, r) => arm.frames[Math.min(r, arm.frames.length - 1)];

  function begin(headers) {
    pause();
    Object.assign(state, { arms: headers.map(newArm), at: 0, follow: true, live: true, hovered: null, pinned: null });
    build();
  }

  function build() {
    $("viewer").hidden = false;
    $("position").hidden = true;
    $("scrub").max = frames() - 1;
    $("arms").replaceChildren();
    const looks = looksOf(state.arms.map((arm) => arm.header.sampler));
    state.views = state.arms.map((arm, a) => buildArm(arm, a, looks[a]));
    buildTabs();
    buildTimeline();
    buildLegend();
    const { model, seed, sample } = state.arms[0].header;
    const keys = state.arms.map(({ header: h }) => [h.digest, h.seed, h.sample, h.length].join());
    $("pairing").textContent = state.arms.length < 2 ? `${model}, seed ${seed}, sample ${sample}.` : new Set(keys).size === 1
      ? `The same randomness under each arm: ${model}, seed ${seed}, sample ${sample}.`
      : "These arms do not share their randomness: model, seed, sample or length differ.";
  }

  // On a narrow screen one arm is seen at a time: by its tab, or by a swipe.
  function buildTabs() {
    $("tabs").replaceChildren(...state.views.map((view, a) => {
      const tab = make("button", view.look.classes, state.arms[a].header.arm);
      tab.type = "button";
      tab.onclick = () => $("arms").scrollTo({ left: view.article.offsetLeft - $("arms").offsetLeft });
      return tab;
    }));
    markTab();
  }

  function markTab() {
    const at = Math.round($("arms").scrollLeft / Math.max(1, $("arms").clientWidth));
    [...$("tabs").children].forEach((tab, a) => tab.setAttribute("aria-current", String(a === at)));
  }

  function buildLegend() {
    const marks = new Map(state.arms.flatMap((arm) => arm.header.marks.map((name) => [name, classOf(arm, name)])));
    const items = [...marks, ["changed", "changed"]].map(([name, classes]) => {
      const item = make("li");
      item.append(make("i", classes, "word"), make("b", "", name), MEANS[name] ? `: ${MEANS[name]}` : "");
      return item;
    });
    const [from, to] = { confidence: ["unsure", "sure"], age: ["new", "old"], none: [] }[state.colour];
    if (from) {
      const item = make("li"), scale = make("span", `scale ${state.colour}`);
      scale.append(...Array.from({ length: LEVELS }, (_, level) => make("span", `k${level}`)));
      item.append(make("b", "", state.colour), `: ${from}`, scale, to);
      items.push(item);
    }
    $("legend").replaceChildren(...items);
  }

  function buildArm(arm, a, look) {
    const article = make("article", `arm arm${a} ${look.classes}`), title = make("h2"), header = make("header"), text = make("div", "text");
    const facts = make("p", "facts"), scores = make("p", "scores"), downloads = make("div", "downloads");
    const asText = make("button", "quiet", "text"), asFile = make("button", "quiet", "trajectory");
    for (const button of [asText, asFile]) { button.type = "button"; button.disabled = true; }
    asText.title = "Download the text"; asFile.title = "Download the trajectory";
    const name = `limpet-${arm.header.model}-${arm.header.seed}-${arm.header.arm}`;
    asText.onclick = () => download(`${name}.txt`, textOf(arm), "text/plain;charset=utf-8");
    asFile.onclick = async () => download(`${name}.limpet`, await fileOf(arm), "application/octet-stream");
    downloads.append(asText, asFile);
    const words = data.words[look.family] ?? data.words[arm.header.sampler.sampler], term = make(words ? "button" : "span", words ? "term" : "", arm.header.arm);
    if (words) Object.assign(term, { type: "button" }).dataset.tip = words;
    title.append(term);
    header.append(title, downloads, facts);
    text.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", `Text under ${arm.header.arm}`);
    const spans = Array.from({ length: arm.header.length }, () => text.appendChild(make("span")));
    const texts = spans.map((span) => span.appendChild(document.createTextNode("")));
    spans.forEach((span, i) => { span.position = i; });
    text.onpointerover = (event) => { if (event.target.position !== undefined) inspect(event.target.position, false, event.target); };
    text.onpointerleave = () => inspect(null, false);
    text.onclick = (event) => {
      const i = event.target.position;
      if (i !== undefined) inspect(state.pinned === i ? null : i, true, event.target);
    };
    text.onfocus = () => { if (text.matches(":focus-visible") && state.pinned === null) inspect(0, true, spans[0]); };
    text.onkeydown = (event) => {
      const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      const i = Math.min(arm.header.length - 1, Math.max(0, (state.pinned ?? -move) + move));
      spans[i].scrollIntoView({ block: "nearest" });
      inspect(i, true, spans[i]);
    };
    article.append(header, text, scores);
    $("arms").append(article);
    return { arm, look, article, text, spans, texts, facts, scores, asText, asFile, classes: [], shown: [] };
  }

  // One frame of every arm. Only what differs from the last paint is touched.
  function paint() {
    state.arms.forEach((arm, a) => paintArm(arm, state.views[a]));
    const n = frames() - 1, r = state.at, arm = state.arms.reduce((x, y) => (total(x) < total(y) ? y : x));
    $("scrub").value = r;
    const halted = state.arms.some(stopped), at = `call ${r + 1} of ${n} · t ${frameAt(arm, r).t.toFixed(3)}`;
    $("where").textContent = r < n ? at : halted ? `stopped at call ${n + 1}` : `output after ${n} calls`;
    $("scrub").setAttribute("aria-valuetext", $("where").textContent);
    for (const cursor of document.querySelectorAll(".chart line")) {
      cursor.setAttribute("x1", r / n * 100);
      cursor.setAttribute("x2", r / n * 100);
    }
    const i = state.pinned ?? state.hovered;
    if (i !== null) paintPosition(i);
  }

  function paintArm(arm, view) {
    const frame = frameAt(arm, state.at);
    if (!frame) return;
    const r = Math.min(state.at, arm.frames.length - 1), last = r === total(arm) - 1;
    const guess = state.show === "guess", tokens = guess ? frame.guess : frame.input;
    const since = guess ? frame.guessSince : frame.since, byAge = state.colour === "age";
    const law = last ? arm.frames[r - 1] : frame; // the output's confidence is its readout's
    let changed = 0;
    for (let i = 0; i < tokens.length; i++) {
      const fresh = r > 0 && since[i] === r;
      if (fresh) changed++;
      const level = byAge ? Math.min(7, Math.floor(Math.log2(1 + r - since[i]) * 1.6))
        : Math.min(7, Math.floor(8 * (1 - law.deficit[i] / DEFICIT)));
      const kind = `k${level}${classesOf(arm, frame.marks[i])}${fresh ? " changed" : ""}`;
      if (view.classes[i] !== kind) { view.spans[i].className = kind; view.classes[i] = kind; }
      if (view.shown[i] !== tokens[i]) {
        view.texts[i].data = visibleWord(arm.words.get(tokens[i]) ?? "\ufffd");
        view.shown[i] = tokens[i];
      }
    }
    const counts = arm.header.marks.map((name, bit) => `${frame.counts[bit]} ${name}`).slice(1);
    view.counted = [...counts, `${changed} changed`];
    const deficit = frame.meanDeficit === null ? [] : [`deficit ${frame.meanDeficit.toFixed(3)}`];
    view.facts.textContent = [...view.counted, ...deficit].join(" · ");
    view.text.classList.toggle("output", last);
    if (state.pinned !== null || state.hovered !== null) markHere();
  }

  function markHere() {
    const i = state.pinned ?? state.hovered;
    for (const view of state.views) {
      if (view.here !== undefined && view.here !== i) {
        view.spans[view.here]?.classList.remove("here");
        view.classes[view.here] = view.spans[view.here]?.className;
      }
      if (i !== null && view.spans[i]) {
        view.spans[i].classList.add("here");
        view.classes[i] = view.spans[i].className;
        view.here = i;
      }
    }
  }

  // What is known of a position, beside its word: while it is pointed at, or until it is let go.
  function inspect(i, pin, anchor = null) {
    if (pin) { state.pinned = i; state.hovered = null; } else state.hovered = i;
    if (anchor && (pin || state.pinned === null)) state.anchor = anchor;
    const shown = state.pinned ?? state.hovered;
    $("position").hidden = shown === null;
    $("position").classList.toggle("pinned", state.pinned !== null);
    markHere();
    if (shown !== null) paintPosition(shown);
  }

  // Under the word, or over it where there is more room; a sheet at the bottom of a narrow screen.
  function place(panel, anchor) {
    if (!anchor?.isConnected) return;
    const box = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect(), gap = 6, edge = 8;
    const { offsetWidth: wide, offsetHeight: high } = panel, room = document.documentElement.clientWidth;
    const below = box.bottom + gap + high <= innerHeight || box.top - gap - high < 0;
    if (getComputedStyle(panel).position === "fixed") {
      panel.style.left = panel.style.top = "";
      return;
    }
    panel.style.left = `${scrollX + Math.max(edge, Math.min(box.left, room - wide - edge))}px`;
    panel.style.top = `${scrollY + (below ? box.bottom + gap : box.top - gap - high)}px`;
  }

  function paintPosition(i) {
    const sides = make("div", "sides");
    state.arms.forEach((arm, a) => {
      const frame = frameAt(arm, state.at);
      if (!frame || i >= arm.header.length) return;
      const side = make("div", `side arm${a} ${state.views[a].look.classes}`), now = Math.min(state.at, arm.frames.length - 1);
      const word = (token) => make("span", "word", JSON.stringify(flatWord(arm.words.get(token) ?? "\ufffd")));
      const summary = make("p", "", `${arm.header.arm}: `);
      summary.append(word(frame.input[i]), ` ${describe(arm, i, now)}`);
      side.append(summary);
      if (now < total(arm) - 1 && !(frame.marks[i] & GIVEN)) {
        const list = make("ol", "candidates"), k = arm.header.candidates;
        for (let c = 0; c < k; c++) {
          const mass = frame.mass[i * k + c] / MASS, item = make("li");
          item.style.setProperty("--mass", `${100 * mass}%`);
          item.append(word(frame.ids[i * k + c]), make("span", "", mass < 0.002 ? "< 0.2%" : `${(100 * mass).toFixed(1)}%`));
          list.append(item);
        }
        side.append(list);
      }
      const history = make("ol", "history");
      for (let r = 0; r < arm.frames.length;) {
        let end = r;
        while (end + 1 < arm.frames.length && arm.frames[end + 1].input[i] === arm.frames[r].input[i]) end++;
        const run = make("li", r <= now && now <= end ? "now" : "", end > r ? `${r + 1}–${end + 1} ` : `${r + 1} `);
        run.append(word(arm.frames[r].input[i]));
        for (const name of causes(arm, i, r)) run.append(" ", make("i", classOf(arm, name), name));
        history.append(run);
        r = end + 1;
      }
      side.append(history);
      sides.append(side);
    });
    const head = make("div", "head"), button = (words, act) => {
      const made = Object.assign(make("button", "", words), { type: "button" });
      made.onclick = act;
      head.append(made);
    };
    head.append(make("h2", "", `Position ${i + 1}${state.pinned === i ? ", pinned" : ""}: what stood here at each call`));
    if (state.pinned === i) {
      const { arm } = state.views.find((view) => view.spans[i] === state.anchor) ?? state.views[0];
      const word = arm.words.get(frameAt(arm, state.at)?.input[i]) ?? "";
      if (state.fix && word) button(`Fix ${JSON.stringify(flatWord(word))} here`, () => { state.fix(arm.header, i, word); inspect(null, true); });
      button("Close", () => { const { anchor } = state; inspect(null, true); anchor?.parentNode.focus({ preventScroll: true }); });
    }
    $("position").replaceChildren(head, sides);
    for (const run of document.querySelectorAll(".history .now")) run.parentNode.scrollTop = run.offsetTop - run.parentNode.offsetTop - 30;
    place($("position"), state.anchor);
  }

  // The marks by which the value that frame r shows came about: what the call before did there, or of marks that nobody
  // here knows, what it set anew.
  function causes(arm, i, r) {
    if (r === 0) return [];
    const before = r > 1 ? arm.frames[r - 2].marks[i] : 0;
    return marksIn(arm, arm.frames[r - 1].marks[i]).filter((name) =>
      COLOURED.includes(name) ? DEEDS.includes(name) : !marksIn(arm, before).includes(name));
  }

  function describe(arm, i, now) {
    const names = marksIn(arm, arm.frames[now].marks[i]);
    const since = (name) => {
      const bit = arm.header.marks.indexOf(name);
      let first = now;
      while (first > 0 && arm.frames[first - 1].marks[i] >> bit & 1) first--;
      if (DEEDS.includes(name)) return `${name} in call ${Math.min(now + 1, arm.header.calls)}`; // the output has its readout's
      return name === "given" ? name : `${name} since call ${first + 1}`;
    };
    return names.length ? names.map(since).join(", ") : "free";
  }

  // Timeline

  // How many positions have the first mark of each sampler's own, and how sure the laws are.
  function charts() {
    const own = [...new Set(state.arms.flatMap((arm) => arm.header.marks.slice(1, 2)))].join(" / ");
    const counts = { title: `${own} positions`, value: (frame) => frame.counts[1] ?? 0, top: (arm) => arm.header.length, text: (v) => v };
    const values = () => state.arms.flatMap((arm) => arm.frames.map((frame) => frame.meanDeficit));
    const deficit = { title: "mean deficit", value: (frame) => frame.meanDeficit, top: () => Math.max(...values()), text: (v) => v.toFixed(3) };
    return own ? [counts, deficit] : [deficit];
  }

  function buildTimeline() {
    $("timeline").replaceChildren(...charts().map((chart) => {
      const figure = make("figure"), caption = make("figcaption");
      const drawing = svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: "chart", role: "img" });
      state.views.forEach((view) => drawing.append(svg("path", { class: view.look.classes })));
      drawing.append(svg("line", { x1: 0, x2: 0, y1: 0, y2: 40 }));
      const seek = (event) => {
        if (event.type === "pointermove" && !event.buttons) return;
        const box = drawing.getBoundingClientRect();
        go(Math.round((event.clientX - box.left) / box.width * (frames() - 1)));
      };
      drawing.addEventListener("pointerdown", seek);
      drawing.addEventListener("pointermove", seek);
      const axes = make("div", "axes"), up = make("div", "up"), along = make("div", "along");
      up.append(make("span", "top"), make("span", "", "0"));
      along.append(make("span", "", "call 1"), make("span", "", frames() > 1 ? `${frames() - 1}` : ""));
      axes.append(up, drawing, along);
      caption.append(make("span", "", chart.title), make("span", "value"));
      figure.append(caption, axes);
      return figure;
    }));
  }

  function paintTimeline() {
    const figures = $("timeline").children;
    charts().forEach((chart, c) => {
      const drawing = figures[c].querySelector("svg"), n = frames() - 1;
      const ends = [], top = Math.max(1e-9, ...state.arms.map(chart.top)); // one scale for all
      figures[c].querySelector(".top").textContent = chart.text(top);
      state.arms.forEach((arm, a) => {
        const points = arm.frames.map(chart.value).map((v, r) => [v, r]).filter(([v]) => v !== null);
        drawing.children[a].setAttribute("d", points.map(([v, r], k) =>
          `${k ? "L" : "M"}${(r / n * 100).toFixed(2)} ${(38.5 - 37 * v / top).toFixed(2)}`).join(""));
        if (points.length) ends.push(`${arm.header.arm} ${chart.text(points[points.length - 1][0])}`);
      });
      figures[c].querySelector(".value").textContent = ends.join(" · ");
      drawing.setAttribute("aria-label", `${chart.title} by call; last: ${ends.join(", ")}`);
    });
  }

  // Moving

  function announce() {
    const parts = state.arms.map((arm, a) => {
      const frame = frameAt(arm, state.at);
      return frame ? `${arm.header.arm}: ${state.views[a].counted.join(", ")}` : "";
    });
    $("announcer").textContent = `${$("where").textContent}. ${parts.join(". ")}.`;
  }

  function go(r, told = true) {
    if (!state.arms.length) return;
    const end = Math.max(0, arrived() - 1);
    state.at = Math.min(Math.max(0, r), end);
    state.follow = state.at === end;
    paint();
    if (told && !state.timer) announce();
  }

  function pause() {
    clearInterval(state.timer);
    state.timer = null;
    $("play").classList.remove("playing");
    $("play").setAttribute("aria-label", "Play");
  }

  function play() {
    if (state.timer) { pause(); announce(); return; }
    if (!state.arms.length) return;
    if (state.at >= arrived() - 1 && !state.live) go(0, false);
    $("play").classList.add("playing");
    $("play").setAttribute("aria-label", "Pause");
    state.timer = setInterval(() => {
      if (state.at >= arrived() - 1) { if (!state.live) { pause(); announce(); } } else go(state.at + 1, false);
    }, Number($("speed").value));
  }

  // What comes in

  function extend(parts) {
    for (const part of parts) addFrame(state.arms[part.arm], fromBase64(part.frame), part.words);
    if (arrived() === 1) setLetters();
    paintTimeline();
    if (state.follow && !state.timer) { state.at = arrived() - 1; }
    paint();
  }

  function setLetters() {
    state.arms.forEach((arm, a) => {
      const words = [...arm.words.values()];
      state.views[a].text.classList.toggle("letters", words.length > 0 && words.every((word) => [...word].length === 1));
    });
  }

  function end(results) {
    state.live = false;
    results.forEach((result, a) => Object.assign(state.arms[a], result));
    finish();
  }

  // Nothing more comes: what came can be looked at, and kept.
  function halt() {
    if (!state.live) return;
    state.live = false;
    finish();
  }

  function finish() {
    state.arms.forEach((arm, a) => {
      const view = state.views[a];
      view.asText.disabled = !arm.frames.length || (arm.text === null && !stopped(arm));
      view.asFile.disabled = arm.frames.length < 2;
      view.scores.replaceChildren(...scoreLine(arm.scores));
    });
    announce();
  }

  function scoreLine(scores) {
    if (scores.perplexity === undefined) return [];
    const { judge, digest, precision, convention, counted } = scores;
    const how = [digest?.slice(0, 12), precision, convention, counted === undefined ? undefined : `${counted} tokens counted`];
    const parts = [make("b", "", scores.perplexity.toFixed(1)), ` perplexity under ${judge} (${how.filter(Boolean).join(", ")})`];
    for (const name of ["entropy", "rep-4"]) {
      if (scores[name] !== undefined) parts.push(" · ", make("b", "", scores[name].toFixed(name === "entropy" ? 2 : 3)), ` ${name}`);
    }
    return parts;
  }

  // Files to look at, unless something else is wanted by the time that they are read.
  async function open(files, wanted = () => true) {
    const arms = await Promise.all(files.map(readFile));
    if (!wanted()) return;
    Object.assign(state, { arms, at: 0, live: false, follow: false });
    build();
    setLetters();
    paintTimeline();
    go(0, false);
    finish();
    performance.mark("opened");
  }

  // A word or two on whatever is pointed at or has the focus, where somebody wrote them.
  function tips() {
    const tip = $("tip");
    let of = null;
    const hide = () => { tip.hidden = true; of?.removeAttribute("aria-describedby"); of = null; };
    const show = (event) => {
      const told = event.target.closest?.("[data-tip]");
      if (!told) return hide();
      tip.textContent = told.dataset.tip;
      tip.hidden = false;
      of?.removeAttribute("aria-describedby");
      of = event.type === "focusin" ? event.target : told.querySelector("input, select") ?? told;
      of.setAttribute("aria-describedby", "tip");
      place(tip, told.querySelector("input, select") ?? told);
    };
    document.addEventListener("pointerover", show);
    document.addEventListener("focusin", show);
    document.addEventListener("focusout", hide);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  }

  // The tallest any frame needs, kept, so that nothing below moves while frames go by.
  function fixHeight() {
    const now = state.at, tallest = state.views.map(() => 0);
    for (let r = 0; r < arrived(); r++) {
      go(r, false);
      state.views.forEach((view, a) => { tallest[a] = Math.max(tallest[a], view.text.offsetHeight); });
    }
    state.views.forEach((view, a) => { view.text.style.minHeight = `${tallest[a]}px`; });
    go(now, false);
  }

  function wire() {
    $("first").onclick = () => { pause(); go(0); };
    $("last").onclick = () => { pause(); go(Infinity); };
    $("back").onclick = () => { pause(); go(state.at - 1); };
    $("forward").onclick = () => { pause(); go(state.at + 1); };
    $("play").onclick = play;
    $("scrub").oninput = () => { pause(); go(Number($("scrub").value)); };
    $("speed").onchange = () => { if (state.timer) { pause(); play(); } };
    $("show").onchange = () => { state.show = $("show").value; go(state.at); };
    $("colour").onchange = () => {
      state.colour = $("colour").value;
      $("arms").classList.remove("confidence", "age", "none");
      $("arms").classList.add(state.colour);
      buildLegend();
      go(state.at);
    };
    $("layout").onchange = () => { $("arms").classList.toggle("grid", $("layout").value === "grid"); };
    $("arms").classList.add(state.colour);
    $("arms").addEventListener("scroll", markTab, { passive: true });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") inspect(null, true);
      const tag = event.target.tagName, typing = ["INPUT", "SELECT", "TEXTAREA"].includes(tag);
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (typing && !(event.target === $("scrub") && event.key === " ")) return; // the scrubber knows its other keys
      if (event.key === " " && (tag === "BUTTON" || tag === "SUMMARY")) return;
      const act = {
        ArrowLeft: () => { pause(); go(state.at - 1); }, ArrowRight: () => { pause(); go(state.at + 1); },
        Home: () => { pause(); go(0); }, End: () => { pause(); go(Infinity); }, " ": play,
      }[event.key];
      if (!act || !state.arms.length) return;
      event.preventDefault();
      act();
    });
  }

  wire();
  tips();
  return { begin, extend, end, halt, open, go, play, fixHeight, state, make, fileOf, data, narrow, looksOf };
})();
