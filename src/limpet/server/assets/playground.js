// The playground: a recorded run to begin with; a form, a request, and its events into the viewer; the address tells the run.
(() => {
  const about = limpet.data, limits = about.limits;
  const $ = (id) => document.getElementById(id), make = limpet.make;
  let running = null; // what aborts the run that is under way
  let ran = false; // whether there was one

  // Arms to begin with; those whose sampler is not here are left out.
  const PRESETS = Object.fromEntries(Object.entries({
    native: { sampler: "native" }, CRS: { sampler: "crs" }, Mend: { sampler: "mend" }, "top-p .9": { sampler: "native", top_p: 0.9 },
    "horizon 8": { sampler: "crs", horizon: 8 }, "CRS, late top-p .9": { sampler: "crs", late_top_p: 0.9 },
    ...Object.fromEntries(Object.keys(about.samplers).filter((name) => !["native", "crs", "mend"].includes(name)).map((sampler) => [sampler, { sampler }])),
  }).filter(([, arm]) => arm.sampler in about.samplers));

  // Knobs, as the server describes them: {name, kind, choices, optional, default, words, low, high, above}.

  const knobsOf = (sampler) => about.samplers[sampler];
  const defaultOf = (knob) => (knob.name === "nfe" ? undefined : knob.default); // calls are the page's unless an arm says

  function knobInput(knob) {
    const options = knob.kind === "bool" ? ["true", "false"] : knob.choices;
    const input = make(options.length ? "select" : "input", options.length ? "" : "narrow");
    if (options.length && knob.optional) input.append(new Option("none", ""));
    if (options.length) input.append(...options.map((value) => new Option(value, value)));
    else if (knob.kind === "str") input.type = "text";
    else Object.assign(input, { type: "number", min: knob.low ?? knob.above ?? "", max: knob.high ?? "", step: knob.kind === "int" ? 1 : "any" });
    if (knob.name === "nfe") Object.assign(input, { max: limits.calls, placeholder: "as above" });
    else input.placeholder = knob.optional ? "none" : knob.default ?? "";
    return input;
  }

  // What a knob's input says; undefined where it says nothing of its own.
  function valueOf(knob, input) {
    const text = input.value.trim();
    if (text === "" && knob.optional) return null;
    if (text === "" && knob.kind !== "str") return defaultOf(knob);
    return knob.kind === "str" ? text : knob.kind === "bool" ? text === "true" : Number(text);
  }

  // The form

  function labelled(name, input) {
    const label = make("label", "", name);
    label.append(input);
    return label;
  }

  function addArm(name, arm) {
    const box = make("fieldset"), named = make("input"), preset = make("select"), sampler = make("select");
    const first = make("div", "row"), more = make("details"), rest = make("div", "row");
    const away = make("button", "quiet", "remove");
    const which = labelled("Sampler", sampler);
    let inputs = []; // [knob, input] of the sampler that is chosen
    named.maxLength = 80;
    named.required = true;
    for (const key of ["custom", ...Object.keys(PRESETS)]) preset.append(new Option(key, key));
    for (const key of Object.keys(about.samplers)) sampler.append(new Option(key, key));
    const custom = () => { preset.value = "custom"; };
    const fill = (title, values) => {
      named.value = title;
      sampler.value = values.sampler;
      which.dataset.tip = about.words[values.sampler];
      inputs = knobsOf(values.sampler).map((knob) => [knob, knobInput(knob)]);
      rest.replaceChildren(...inputs.map(([knob, input]) => {
        input.value = (knob.name in values ? values[knob.name] : defaultOf(knob)) ?? "";
        input.onchange = custom;
        const words = knob.name.replaceAll("_", " "), label = labelled(words.charAt(0).toUpperCase() + words.slice(1), input);
        label.dataset.tip = knob.words;
        return label;
      }));
    };
    preset.onchange = () => { if (preset.value !== "custom") fill(preset.value, PRESETS[preset.value]); };
    sampler.onchange = () => { fill(sampler.value, { sampler: sampler.value }); custom(); };
    away.type = "button";
    away.onclick = () => { box.remove(); renumber(); };
    first.append(labelled("Preset", preset), which, labelled("Name", named), away);
    more.append(make("summary", "", "Every knob"), rest);
    box.append(make("legend"), first, more);
    $("samplers").append(box);
    box.read = () => {
      const chosen = { sampler: sampler.value };
      for (const [knob, input] of inputs) {
        const value = valueOf(knob, input);
        if (value !== undefined && value !== defaultOf(knob)) chosen[knob.name] = value;
      }
      return [named.value, chosen];
    };
    fill(name, arm);
    preset.value = Object.keys(PRESETS).find((key) => same(PRESETS[key], box.read()[1])) ?? "custom";
    renumber();
  }

  // Arms as a link or the server has them, each put into the form; whatever cannot be there is an error.
  function putArms(arms) {
    if (typeof arms !== "object" || arms === null || !Object.keys(arms).length) throw new Error("it holds no arms");
    for (const [name, arm] of Object.entries(arms)) {
      const here = Object.hasOwn(about.samplers, String(arm?.sampler)), knobs = here && knobsOf(arm.sampler);
      if (!here) throw new Error(`arm ${name} has the sampler ${arm?.sampler}, which is not here`);
      const strange = Object.keys(arm).find((key) => key !== "sampler" && !knobs.some((knob) => knob.name === key));
      if (strange) throw new Error(`${arm.sampler} has no knob ${strange}`);
    }
    const calls = Object.values(arms)[0].nfe ?? $("nfe").value;
    $("nfe").value = calls;
    $("samplers").replaceChildren();
    for (const [name, { nfe, ...arm }] of Object.entries(arms).slice(0, limits.arms)) {
      addArm(name, nfe === undefined || nfe === Number(calls) ? arm : { ...arm, nfe });
    }
  }

  function renumber() {
    const boxes = [...$("samplers").children], looks = limpet.looksOf(boxes.map((box) => box.read()[1]));
    boxes.forEach((box, a) => {
      box.className = looks[a].classes;
      box.querySelector("legend").textContent = `Arm ${a + 1}`;
      box.querySelector("button.quiet").hidden = boxes.length === 1;
    });
    $("add").disabled = boxes.length >= limits.arms;
    summarise();
  }

  const same = (one, two) => JSON.stringify(Object.entries(one).sort()) === JSON.stringify(Object.entries(two).sort());

  // The first preset that no arm is yet.
  function another() {
    const there = [...$("samplers").children].map((box) => box.read()[1]);
    const found = Object.entries(PRESETS).find(([, arm]) => !there.some((one) => same(one, arm)));
    addArm(...found ?? Object.entries(about.arms)[0]);
  }

  // The form in a few words, for where it is folded.
  function summarise() {
    const names = [...$("samplers").children].map((box) => box.read()[0]);
    $("chosen").textContent = [$("model").value, `${$("nfe").value} calls`, names.join(" · ")].join(", ");
  }

  function addFixed(position = "", text = "") {
    const row = make("div", "row"), at = make("input", "narrow"), words = make("input"), away = make("button", "quiet", "remove");
    Object.assign(at, { type: "number", min: 1, max: limits.length, value: position, required: true });
    Object.assign(words, { type: "text", value: text, required: true });
    away.type = "button";
    away.onclick = () => row.remove();
    const wide = labelled("Words", words);
    wide.className = "wide";
    row.append(labelled("Position", at), wide, away);
    row.read = () => ({ position: Number(at.value) - 1, text: words.value });
    $("fixed").append(row);
  }

  // A word of a text, held from now on where it stands.
  function hold({ model }, position, word) {
    if ($("model").value !== model && about.models.some((each) => each.name === model)) {
      $("model").value = model;
      chooseModel();
    }
    [...$("fixed").children].find((row) => row.read().position === position)?.remove();
    addFixed(position + 1, word);
    $("fixing").open = true;
    say(`${JSON.stringify(word)} is held at position ${position + 1}: press Run.`);
  }

  function chooseModel() {
    const model = about.models.find((each) => each.name === $("model").value);
    $("length").value = model.length;
    $("length").disabled = !model.any_length;
    $("prompt").disabled = !model.text;
    limpet.state.fix = model.text ? hold : null;
    summarise();
  }

  // The request, as the form has it; arms hold only what differs from the samplers' defaults.
  function read() {
    const model = about.models.find((each) => each.name === $("model").value), nfe = Number($("nfe").value);
    const arms = {};
    for (const box of $("samplers").children) {
      const [name, chosen] = box.read();
      let free = name;
      for (let k = 2; Object.hasOwn(arms, free); k++) free = `${name} ${k}`;
      arms[free] = knobsOf(chosen.sampler).some((knob) => knob.name === "nfe") ? { nfe, ...chosen } : chosen;
    }
    const ask = { model: model.name, seed: Number($("seed").value), arms };
    if (model.any_length && $("length").value) ask.length = Number($("length").value);
    if ($("prompt").value) ask.prompt = $("prompt").value;
    const fixed = [...$("fixed").children].map((row) => row.read());
    if (fixed.length) ask.fixed = fixed;
    return ask;
  }

  // The address: model, seed, arms and the words given, each under its own name.
  function addressOf(ask) {
    const model = about.models.find((each) => each.name === ask.model), query = new URLSearchParams();
    query.set("model", ask.model);
    query.set("digest", model.digest.slice(0, 12));
    query.set("seed", ask.seed);
    if (ask.length) query.set("length", ask.length);
    if (ask.prompt) query.set("prompt", ask.prompt);
    if (ask.fixed) query.set("fixed", JSON.stringify(ask.fixed));
    query.set("arms", JSON.stringify(ask.arms));
    return `${location.pathname}?${query}`;
  }

  function restore() {
    const query = new URLSearchParams(location.search);
    if (!query.has("arms")) return;
    try {
      const model = about.models.find((each) => each.name === query.get("model"));
      if (!model) throw new Error(`there is no model ${query.get("model")} here`);
      const arms = JSON.parse(query.get("arms")), fixed = JSON.parse(query.get("fixed") ?? "[]");
      $("model").value = model.name;
      chooseModel();
      $("seed").value = query.get("seed") ?? "";
      if (query.has("length")) $("length").value = query.get("length");
      $("prompt").value = query.get("prompt") ?? "";
      for (const each of fixed) addFixed(Number(each.position) + 1, String(each.text));
      $("fixing").open = fixed.length > 0;
      putArms(arms);
      const other = query.get("digest") && !model.digest.startsWith(query.get("digest"));
      if (other) warn(`This link was made with other weights of ${model.name} (${query.get("digest")}, here ${model.digest.slice(0, 12)}): its texts will differ.`);
      say("As the link says: press Run.");
    } catch (error) {
      complain(`This link cannot be read: ${error.message}.`);
    }
  }

  // A run

  const say = (text) => { $("status").textContent = text; };
  const warn = (text) => { $("notice").textContent = text; };
  const complain = (text) => { $("problem").textContent = text; };
  const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`.replace(/\.\.$/, ".");
  const GONE = `The server at ${location.host} does not answer. Start it again (limpet serve), then press Run; what came stays here.`;

  // What Run says, and whether it can be pressed.
  function show(work) {
    $("run").textContent = work || "Run";
    $("run").setAttribute("aria-disabled", String(Boolean(work)));
    $("stop").disabled = !work;
  }

  async function run(ask) {
    const mine = running = new AbortController();
    ran = true;
    complain("");
    show("Asking …");
    say("");
    try {
      const answer = await fetch("api/compare", {
        method: "POST", signal: mine.signal, body: JSON.stringify(ask),
        headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      });
      if (!answer.ok) {
        const told = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
        throw new Error(told.error);
      }
      history.replaceState(null, "", addressOf(ask));
      const calls = Math.max(...Object.values(ask.arms).map((arm) => arm.nfe ?? 0));
      let ended = false, came = 0;
      for await (const [kind, data] of events(answer.body)) {
        if (kind === "queued") {
          show("Waiting …");
          say(data.ahead === 1 ? "One run is before this one." : `${data.ahead} runs are before this one.`);
        }
        if (kind === "begin") {
          $("story").hidden = true;
          limpet.begin(data.arms);
          if ($("viewer").getBoundingClientRect().top > innerHeight * 0.7) $("viewer").scrollIntoView();
        }
        if (kind === "frame") {
          limpet.extend(data.arms);
          show("Running …");
          say(`${Math.min(++came, calls || came)} of ${calls || "?"} calls`);
        }
        if (kind === "end") { limpet.end(data.arms); ended = true; say("Done."); }
        if (kind === "error") throw new Error(data.error);
      }
      if (!ended) throw new TypeError("it broke off");
    } catch (error) {
      limpet.halt();
      say(mine.signal.aborted ? "Stopped." : "");
      // A TypeError is how fetch and its stream say that nobody is there.
      if (!mine.signal.aborted) complain(error instanceof TypeError ? GONE : sentence(error.message));
    } finally {
      running = null;
      show("");
    }
  }

  // Server-sent events of a body, as [kind, data].
  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const lines = text.slice(0, end).split("\n");
        const kind = lines.find((line) => line.startsWith("event: ")), data = lines.find((line) => line.startsWith("data: "));
        if (kind && data) yield [kind.slice(7), JSON.parse(data.slice(6))];
      }
    }
  }

  for (const model of about.models) $("model").append(new Option(model.name, model.name));
  $("nfe").max = limits.calls;
  $("length").max = limits.length;
  $("seed").max = limits.seed;
  $("model").onchange = chooseModel;
  $("reseed").onclick = () => { $("seed").value = Math.floor(Math.random() * 1e6); };
  $("fix").onclick = () => addFixed();
  $("add").onclick = another;
  $("stop").onclick = () => running?.abort();
  $("link").onclick = async () => {
    history.replaceState(null, "", addressOf(read()));
    try { await navigator.clipboard.writeText(location.href); say("The link is copied."); } catch { say("The link is in the address bar."); }
  };
  $("form").onsubmit = (event) => {
    event.preventDefault();
    if (!running) run(read());
  };
  $("form").onchange = renumber;
  $("form").addEventListener("invalid", () => { $("setup").open = true; }, true); // what is to mend must be seen
  $("setup").open = !limpet.narrow.matches;
  chooseModel();
  restore(); // a link fills the form and starts nothing: whoever opens it decides
  if (!$("samplers").children.length) putArms(about.arms);
  limpet.open(about.recorded, () => !ran).then(() => {
    if (ran) return;
    limpet.fixHeight();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) limpet.go(Infinity);
    else limpet.play();
  });
})();
