// An interactive scatter plot: one panel at a time, families shown or hidden, the texts of any points side by side.
// It replaces the still figure. Text enters as text only: no string is parsed as HTML.
"use strict";
(() => {
  const MAX_TEXTS = 3; // side by side
  const NEAR = 26; // pixels within which the pointer selects a point
  const FAR = 2; // of an axis, in widths of the middle half of its values
  const MAX_NAMES = 8; // of points outside the axes
  const SHAPES = [
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0", "M-4-4H4V4H-4z", "M0-5.4L5 3.6H-5z", "M0-5.6L5.6 0L0 5.6L-5.6 0z",
  ];
  const data = JSON.parse(document.getElementById("scatters").textContent);

  function make(tag, fields = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(fields)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  function draw(tag, fields, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(fields)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  // The cell and the texts of every point, from compressed base64.
  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }
  let unpacked = null;
  const texts = () => (unpacked ??= unpack(data.texts));
  let count = 0; // of points in all panels of all plots: the place of a point's texts

  const OUTSIDE = "outside the axes, drawn at the edge";
  const numeral = (value, error) =>
    value === null ? "no value" : value.toFixed(3) + (error === null ? "" : ` ± ${error.toFixed(3)}`);

  // About `count` round numbers between two numbers.
  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((one) => one * power >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), found = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push([i * step, (i * step).toFixed(digits)]);
    return found;
  }

  // The ends of an axis: the values with their errors, and a margin. Values further from the middle half than `FAR`
  // times its width lie outside.
  function ends(pairs) {
    const sorted = pairs.map(([v]) => v).sort((a, b) => a - b), at = (share) => sorted[Math.round(share * (sorted.length - 1))];
    const reach = FAR * (at(0.75) - at(0.25)) || Infinity, least = at(0.25) - reach, most = at(0.75) + reach;
    const inside = pairs.filter(([v]) => v >= least && v <= most);
    const low = Math.max(least, Math.min(...inside.map(([v, e]) => v - e)));
    const high = Math.min(most, Math.max(...inside.map(([v, e]) => v + e)));
    const margin = (high - low || 1) * 0.05;
    return [low - margin, high + margin];
  }

  function open(scatter) {
    const families = [...new Set(scatter.samplers.map(([, family]) => family))];
    const panels = scatter.panels.map(({ title, points }) => ({
      title,
      points: points.map(([i, x, xError, y, yError]) => {
        const [sampler, family] = scatter.samplers[i];
        return { key: count++, sampler, family, title, x, xError, y, yError };
      }),
    }));
    const styleOf = (family) => {
      const i = families.indexOf(family), own = scatter.colours[i];
      // Families of one colour differ in shape.
      const before = scatter.colours.slice(0, i).filter((colour) => colour === own).length;
      return { class: `is-${own}`, d: SHAPES[before % SHAPES.length] };
    };
    const numbers = (point) =>
      [`${scatter.x}: ${numeral(point.x, point.xError)}`, `${scatter.y}: ${numeral(point.y, point.yError)}`];
    const hidden = new Set();
    let words = []; // of the filter
    let panel = panels[0], chosen = [], current = null, placed = [];

    const place = document.getElementById(`scatter-${scatter.name}`).parentElement;
    const select = make("select", { onchange: () => showPanel(select.selectedIndex) },
      ...panels.map(({ title }) => make("option", {}, title)));
    const stepButton = (by, name, sign) => {
      const onclick = () => showPanel((panels.indexOf(panel) + by + panels.length) % panels.length);
      return make("button", { type: "button", "aria-label": name, onclick }, sign);
    };
    const legend = make("div", { class: "legend", role: "group", "aria-label": "Families" });
    const plot = draw("svg", { role: "group", "aria-label": scatter.caption });
    const popover = make("div", { class: "popover", "aria-hidden": "true", hidden: "" });
    const wrapper = make("div", { class: "plot" }, plot, popover);
    const status = make("p", { class: "note", role: "status" });
    const outside = make("p", { class: "note" });
    const below = make("div", { class: "texts" });
    const section = make("section", { class: "scatter", "aria-label": scatter.caption },
      make("p", { class: "choose" },
        make("label", {}, "Panel ", select), stepButton(-1, "Previous panel", "‹"), stepButton(1, "Next panel", "›")),
      wrapper, outside, legend,
      make("p", { class: "note" }, `${scatter.caption} Arrow keys go from point to point. A click or Enter shows the `
        + `texts of a point below, up to ${MAX_TEXTS} side by side.`),
      status, below);
    place.before(section);
    place.hidden = true; // with the still figure

    function showPanel(i) {
      panel = panels[i];
      select.selectedIndex = i;
      render();
    }

    // Families

    function toggles() {
      const all = (show) => {
        families.forEach((family) => (show ? hidden.delete(family) : hidden.add(family)));
        toggles();
        render();
      };
      legend.replaceChildren(
        ...families.map((family) => {
          const { class: colour, d } = styleOf(family);
          const marker = draw("svg", { viewBox: "-7 -7 14 14", class: colour, "aria-hidden": "true" },
            draw("path", { d }));
          const button = make("button", { type: "button", "aria-pressed": String(!hidden.has(family)) },
            marker, family);
          button.addEventListener("click", () => {
            if (!hidden.delete(family)) hidden.add(family);
            button.setAttribute("aria-pressed", String(!hidden.has(family)));
            render();
          });
          return button;
        }),
        make("button", { type: "button", onclick: () => all(true) }, "all"),
        make("button", { type: "button", onclick: () => all(false) }, "none"),
      );
    }

    // The plot

    function render() {
      const isNamed = ({ sampler, family }) => words.every((word) => `${family} ${sampler}`.toLowerCase().includes(word));
      const shown = panel.points.filter((point) =>
        !hidden.has(point.family) && point.x !== null && point.y !== null && isNamed(point));
      const width = Math.max(280, wrapper.clientWidth), height = Math.round(Math.min(540, Math.max(320, width * 0.6)));
      const left = 52, right = width - 12, top = 12, bottom = height - 44;
      const [x0, x1] = shown.length ? ends(shown.map((point) => [point.x, point.xError ?? 0])) : [0, 1];
      const [y0, y1] = shown.length ? ends(shown.map((point) => [point.y, point.yError ?? 0])) : [0, 1];
      const across = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
      const up = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
      const isOutside = ({ x, y }) => x < x0 || x > x1 || y < y0 || y > y1;
      const within = (low, value, high) => Math.min(Math.max(value, low), high);
      const clip = `clip-${scatter.name}`, inside = { "aria-hidden": "true", "clip-path": `url(#${clip})` };
      plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const line = (x1, y1, x2, y2, kind) => draw("line", { x1, y1, x2, y2, class: kind });
      const text = (x, y, words, anchor, more = {}) => draw("text", { x, y, "text-anchor": anchor, ...more }, words);
      const axes = draw("g", { "aria-hidden": "true" },
        ...ticks(x0, x1, width / 110).flatMap(([x, words]) =>
          [line(across(x), top, across(x), bottom, "grid"), text(across(x), bottom + 16, words, "middle")]),
        ...ticks(y0, y1, height / 70).flatMap(([y, words]) =>
          [line(left, up(y), right, up(y), "grid"), text(left - 6, up(y) + 4, words, "end")]),
        text((left + right) / 2, height - 8, scatter.x, "middle"),
        text(0, 0, scatter.y, "middle", { transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)` }));
      const frame = draw("clipPath", { id: clip }, draw("rect", { x: left, y: top, width: right - left, height: bottom - top }));
      const curves = draw("g", inside, ...scatter.joined.map((family) => {
        const own = shown.filter((point) => point.family === family);
        const points = own.map((point) => `${across(point.x)},${up(point.y)}`).join(" ");
        return draw("polyline", { points, class: `curve ${styleOf(family).class}` });
      }));
      const bars = draw("g", inside, ...shown.flatMap((point) => {
        const x = across(point.x), y = up(point.y), kind = `bar ${styleOf(point.family).class}`;
        return [line(across(point.x - (point.xError ?? 0)), y, across(point.x + (point.xError ?? 0)), y, kind),
          line(x, up(point.y - (point.yError ?? 0)), x, up(point.y + (point.yError ?? 0)), kind)];
      }));
      placed = shown.map((point) => {
        const { class: colour, d } = styleOf(point.family), isFar = isOutside(point);
        const x = within(left, across(point.x), right), y = within(top, up(point.y), bottom);
        const mark = draw("path", {
          d, class: `point ${colour}${isFar ? " outside" : ""}`, transform: `translate(${x} ${y})`, role: "button", tabindex: "-1",
          "aria-label": [point.sampler, point.family, ...numbers(point), ...(isFar ? [OUTSIDE] : [])].join(", "),
          "aria-pressed": String(holds(point)),
        });
        return { point, x, y, mark, isFar };
      }).sort((a, b) => a.x - b.x);
      plot.replaceChildren(frame, axes, curves, bars, draw("g", {}, ...placed.map(({ mark }) => mark)));
      const far = placed.filter(({ isFar }) => isFar).map(({ point }) => `${point.sampler} (${numbers(point).join(", ")})`);
      const more = far.length > MAX_NAMES ? `; and ${far.length - MAX_NAMES} more` : "";
      outside.textContent = far.length
        ? `${far.length} hollow ${far.length === 1 ? "point lies" : "points lie"} outside the axes, at the nearest edge: `
          + `${far.slice(0, MAX_NAMES).join("; ")}${more}.`
        : "";
      placed[0]?.mark.setAttribute("tabindex", "0"); // the one stop of the Tab key
      hide();
      current = null;
    }

    // The popover

    function setCurrent(to) {
      if (current !== to) {
        placed.forEach(({ mark }) => mark.setAttribute("tabindex", mark === to.mark ? "0" : "-1"));
        current?.mark.classList.remove("current");
        current = to;
        to.mark.classList.add("current");
      }
      const { point } = to;
      popover.replaceChildren(
        make("b", {}, point.sampler), ...[point.family, ...numbers(point), ...(to.isFar ? [OUTSIDE] : [])].map((words) => make("span", {}, words)));
      popover.hidden = false;
      const scale = plot.clientWidth / plot.viewBox.baseVal.width || 1, x = to.x * scale, y = to.y * scale;
      const most = wrapper.clientWidth - popover.offsetWidth;
      popover.style.left = `${Math.max(0, Math.min(most, x - popover.offsetWidth / 2))}px`;
      popover.style.top = `${y - popover.offsetHeight - 12 < 0 ? y + 14 : y - popover.offsetHeight - 12}px`;
    }

    function hide() {
      popover.hidden = true;
      current?.mark.classList.remove("current");
    }

    function nearest(event) {
      const box = plot.getBoundingClientRect(), scale = box.width / plot.viewBox.baseVal.width || 1;
      const far = ({ x, y }) => Math.hypot(box.left + x * scale - event.clientX, box.top + y * scale - event.clientY);
      const found = placed.reduce((best, one) => (best && far(best) <= far(one) ? best : one), null);
      return found && far(found) <= NEAR ? found : null;
    }

    plot.addEventListener("pointermove", (event) => {
      const found = nearest(event);
      if (found) setCurrent(found);
      else if (!plot.contains(document.activeElement)) hide();
    });
    plot.addEventListener("pointerleave", () => plot.contains(document.activeElement) || hide());
    plot.addEventListener("click", (event) => {
      const found = nearest(event);
      if (found) {
        setCurrent(found);
        toggle(found.point);
      }
    });
    // Listeners for keys and focus are on the wrapper: some browsers give the Tab key a stop at an SVG that has them.
    wrapper.addEventListener("focusin", (event) => {
      const found = placed.find(({ mark }) => mark === event.target);
      if (found && found.mark.matches(":focus-visible")) setCurrent(found);
    });
    wrapper.addEventListener("focusout", hide);
    wrapper.addEventListener("keydown", (event) => {
      const at = placed.findIndex(({ mark }) => mark === event.target);
      if (at < 0) return;
      const own = placed.filter(({ point }) => point.family === placed[at].point.family);
      const among = own.indexOf(placed[at]);
      const to = {
        ArrowRight: placed[at + 1], ArrowLeft: placed[at - 1], Home: placed[0], End: placed.at(-1),
        ArrowUp: own[among + 1], ArrowDown: own[among - 1], // along its family
      };
      if (event.key === "Enter" || event.key === " ") toggle(placed[at].point);
      else if (event.key === "Escape") hide();
      else if (event.key in to) to[event.key]?.mark.focus();
      else return;
      event.preventDefault();
    });

    // The texts

    function holds(point) {
      return chosen.includes(point);
    }

    function toggle(point) {
      const isChosen = holds(point);
      const left = isChosen ? chosen.filter((one) => one !== point) : [...chosen, point];
      const gone = left.slice(0, -MAX_TEXTS);
      status.textContent = gone.length
        ? `${point.sampler} replaces ${gone[0].sampler}.`
        : `Texts of ${point.sampler} ${isChosen ? "removed" : "shown below"}.`;
      chosen = left.slice(-MAX_TEXTS);
      for (const { point: one, mark } of placed) mark.setAttribute("aria-pressed", String(holds(one)));
      return show();
    }

    async function show() {
      let all = [], problem = "The report holds no text of this sampler.";
      try {
        all = await texts();
      } catch {
        problem = "This browser is too old to unpack the texts.";
      }
      below.replaceChildren(...chosen.map((point) => {
        const samples = all[point.key]?.slice(1) ?? [], name = `${point.sampler}, ${point.title}`;
        const onclick = () => toggle(point);
        return make("article", { "aria-label": name },
          make("header", {},
            make("h3", { class: styleOf(point.family).class }, point.sampler),
            make("button", { type: "button", "aria-label": `Remove ${name}`, onclick }, "remove"),
            make("p", {}, [point.title, point.family, ...numbers(point)].join(" · "))),
          ...samples.map((sample) => make("p", { class: "sample" }, sample)),
          ...(samples.length ? [] : [make("p", {}, problem)]));
      }));
    }

    document.addEventListener("filter", (event) => {
      words = event.detail;
      render();
    });
    toggles();
    render();
    let wide = wrapper.clientWidth;
    new ResizeObserver(() => {
      if (wrapper.clientWidth !== wide) {
        wide = wrapper.clientWidth;
        render();
      }
    }).observe(wrapper);
  }

  data.scatters.forEach(open);
})();
