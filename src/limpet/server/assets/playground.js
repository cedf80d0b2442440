// The playground: it shows a recorded run, sends what the form asks for, and passes the events of the answer to the viewer.
// The address of the page holds the whole request.
(() => {
  const about = limpet.data, limits = about.limits;
  const $ = (id) => document.getElementById(id), make = limpet.make;
  let running = null; // the AbortController of the current run
  let hasRun = false; // whether there was a run on this page

  const RECOMMENDED = "recommended", CUSTOM = "custom"; // a preset with a dial, and what is no preset

  // Samplers to choose from; those that this server does not have are left out.
  const PRESETS = Object.fromEntries(Object.entries({
    native: { sampler: "native" }, CRS: { sampler: "crs" }, Mend: { sampler: "mend" }, "top-p .9": { sampler: "native", top_p: 0.9 },
    "horizon 8": { sampler: "crs", horizon: 8 }, "CRS, late top-p .9": { sampler: "crs", late_top_p: 0.9 },
    ...Object.fromEntries(Object.keys(about.params).filter((name) => !["native", "crs", "mend"].includes(name)).map((sampler) => [sampler, { sampler }])),
  }).filter(([, values]) => values.sampler in about.params));

  // Parameters as the server describes them: {name, kind, choices, optional, default, help, low, high, above}.

  const paramsOf = (sampler) => about.params[sampler];
  const defaultOf = (param) => (param.name === "nfe" ? undefined : param.default); // the number of calls is the page's, unless a sampler has its own

  function paramInput(param) {
    const options = param.kind === "bool" ? ["true", "false"] : param.choices;
    const input = make(options.length ? "select" : "input", options.length ? "" : "narrow");
    if (options.length && param.optional) input.append(new Option("none", ""));
    if (options.length) input.append(...options.map((value) => new Option(value, value)));
    else if (param.kind === "str") input.type = "text";
    else Object.assign(input, { type: "number", min: param.low ?? param.above ?? "", max: param.high ?? "", step: param.kind === "int" ? 1 : "any" });
    if (param.name === "nfe") Object.assign(input, { max: limits.calls, placeholder: "as above" });
    else input.placeholder = param.optional ? "none" : param.default ?? "";
    return input;
  }

  // The value of a parameter's input; undefined for its default.
  function valueOf(param, input) {
    const text = input.value.trim();
    if (text === "" && param.optional) return null;
    if (text === "" && param.kind !== "str") return defaultOf(param);
    return param.kind === "str" ? text : param.kind === "bool" ? text === "true" : Number(text);
  }

  // The form

  const modelNow = () => about.models.find((each) => each.name === $("model").value);
  const dialNow = () => Number($("nfe").value) < about.many_calls ? modelNow().dial_of_few_calls : modelNow().dial;
  const hasDial = () => modelNow().dial.every((one) => one.sampler in about.params);
  const sharpnessOf = (stop) => stop / (modelNow().dial.length - 1);

  function withCaption(caption, input) {
    const element = make("label", "", caption);
    element.append(input);
    return element;
  }

  // A box of the form: a preset, the dial of the recommended sampler, and, folded, the parameters that follow from them.
  function addSampler(name, values) {
    const box = make("fieldset"), nameInput = make("input"), preset = make("select"), sampler = make("select");
    const dial = make("input"), amount = make("output"), sharpness = make("label", "dial wide", "Sharpness ");
    const first = make("div", "row first"), more = make("details"), named = make("div", "row"), rest = make("div", "row params");
    const remove = make("button", "quiet", "remove");
    const which = withCaption("Sampler", sampler);
    let inputs = []; // [param, input] of the chosen sampler
    nameInput.maxLength = 80;
    nameInput.required = true;
    for (const key of [...hasDial() ? [RECOMMENDED] : [], ...Object.keys(PRESETS), CUSTOM]) preset.append(new Option(key, key));
    for (const key of Object.keys(about.params)) sampler.append(new Option(key, key));
    const choose = (key) => {
      preset.value = key;
      sharpness.hidden = key !== RECOMMENDED;
    };
    const fill = (title, values) => {
      nameInput.value = title;
      sampler.value = values.sampler;
      which.dataset.tip = about.descriptions[values.sampler];
      inputs = paramsOf(values.sampler).map((param) => [param, paramInput(param)]);
      rest.replaceChildren(...inputs.map(([param, input]) => {
        input.value = (param.name in values ? values[param.name] : defaultOf(param)) ?? "";
        input.onchange = () => choose(CUSTOM);
        const title = param.name.replaceAll("_", " "), field = withCaption(title.charAt(0).toUpperCase() + title.slice(1), input);
        field.dataset.tip = param.help;
        return field;
      }));
    };
    const turn = () => {
      choose(RECOMMENDED);
      amount.value = String(sharpnessOf(Number(dial.value)));
      dial.setAttribute("aria-valuetext", amount.value);
      fill(`sharpness=${amount.value}`, dialNow()[Number(dial.value)]);
    };
    Object.assign(dial, { type: "range", min: 0, max: modelNow().dial.length - 1, step: 1, value: Math.round((modelNow().dial.length - 1) * about.sharpness) });
    dial.oninput = () => { turn(); renumber(); };
    sharpness.append(amount, dial);
    sharpness.dataset.tip = "From 0, diverse, to 1, sharp: how much diversity is given up for more probable texts. The parameters below follow.";
    preset.onchange = () => {
      if (preset.value === RECOMMENDED) turn();
      else if (preset.value !== CUSTOM) { choose(preset.value); fill(preset.value, PRESETS[preset.value]); }
    };
    sampler.onchange = () => { fill(sampler.value, { sampler: sampler.value }); choose(CUSTOM); };
    remove.type = "button";
    remove.onclick = () => { box.remove(); renumber(); };
    const presetField = withCaption("Preset", preset);
    presetField.dataset.tip = "A sampler with its parameters; the recommended one has a dial. Change any parameter below to make it your own.";
    first.append(presetField, sharpness, remove);
    const nameField = withCaption("Name", nameInput);
    nameField.dataset.tip = "What the run calls this sampler.";
    named.append(which, nameField);
    more.append(make("summary", "", "Sampler and parameters"), named, rest);
    box.append(make("legend"), first, more);
    $("samplers").append(box);
    box.read = () => {
      const chosen = { sampler: sampler.value };
      for (const [param, input] of inputs) {
        const value = valueOf(param, input);
        if (value !== undefined && value !== defaultOf(param)) chosen[param.name] = value;
      }
      return [nameInput.value, chosen];
    };
    box.follow = () => { if (preset.value === RECOMMENDED) turn(); };
    fill(name, values);
    const read = box.read()[1], stop = dialNow().findIndex((one) => same(one, read));
    if (stop >= 0) { dial.value = stop; amount.value = String(sharpnessOf(stop)); dial.setAttribute("aria-valuetext", amount.value); }
    choose(stop >= 0 ? RECOMMENDED : Object.keys(PRESETS).find((key) => same(PRESETS[key], read)) ?? CUSTOM);
    renumber();
  }

  // Put samplers from a link or from the server into the form; throws for one that this server does not have.
  function putSamplers(samplers) {
    if (typeof samplers !== "object" || samplers === null || !Object.keys(samplers).length) throw new Error("it has no samplers");
    for (const values of Object.values(samplers)) {
      if (!Object.hasOwn(about.params, String(values?.sampler))) throw new Error(`this server has no sampler ${values?.sampler}`);
      const known = ["sampler", ...paramsOf(values.sampler).map((param) => param.name)];
      const unknown = Object.keys(values).find((key) => !known.includes(key));
      if (unknown) throw new Error(`${values.sampler} has no parameter ${unknown}`);
    }
    const calls = Object.values(samplers)[0].nfe ?? $("nfe").value;
    $("nfe").value = calls;
    $("samplers").replaceChildren();
    for (const [name, { nfe, ...values }] of Object.entries(samplers).slice(0, limits.samplers)) {
      addSampler(name, nfe === undefined || nfe === Number(calls) ? values : { ...values, nfe });
    }
  }

  function renumber() {
    const boxes = [...$("samplers").children], styles = limpet.stylesOf(boxes.map((box) => box.read()[1]));
    boxes.forEach((box, index) => {
      box.className = styles[index].classes;
      box.querySelector("legend").textContent = `${index + 1}: ${box.read()[0]}`;
      box.querySelector("button.quiet").hidden = boxes.length === 1;
    });
    $("add").disabled = boxes.length >= limits.samplers;
    summarise();
  }

  const same = (one, two) => JSON.stringify(Object.entries(one).sort()) === JSON.stringify(Object.entries(two).sort());

  // Add the first preset that is not in the form yet.
  function addNextPreset() {
    const there = [...$("samplers").children].map((box) => box.read()[1]);
    const found = Object.entries(PRESETS).find(([, values]) => !there.some((one) => same(one, values)));
    addSampler(...found ?? Object.entries(about.samplers)[0]);
  }

  // Summarise the form, for when it is folded.
  function summarise() {
    const names = [...$("samplers").children].map((box) => box.read()[0]);
    $("chosen").textContent = [$("model").value, `${$("nfe").value} calls`, names.join(" · ")].join(", ");
  }

  function addFixed(position = "", text = "") {
    const row = make("div", "row"), at = make("input", "narrow"), content = make("input"), remove = make("button", "quiet", "remove");
    Object.assign(at, { type: "number", min: 1, max: limits.length, value: position, required: true });
    Object.assign(content, { type: "text", value: text, required: true });
    remove.type = "button";
    remove.onclick = () => row.remove();
    const wide = withCaption("Text", content);
    wide.className = "wide";
    row.append(withCaption("Position", at), wide, remove);
    row.read = () => ({ position: Number(at.value) - 1, text: content.value });
    $("fixed").append(row);
  }

  // Fix a word of a text at its position in the next run.
  function fixWord({ model }, position, word) {
    if ($("model").value !== model && about.models.some((each) => each.name === model)) {
      $("model").value = model;
      chooseModel();
    }
    [...$("fixed").children].find((row) => row.read().position === position)?.remove();
    addFixed(position + 1, word);
    $("fixing").open = true;
    say(`${JSON.stringify(word)} is fixed at position ${position + 1}: press Run.`);
  }

  function chooseModel() {
    const model = modelNow(), [first] = model.examples, isOther = about.models.some((each) => each.examples.some(([, prompt]) => prompt === $("prompt").value));
    if (isOther || !$("prompt").value) $("prompt").value = first?.[1] ?? "";
    $("length").value = Math.min(model.page_length, limits.length);
    $("length").disabled = !model.any_length;
    $("prompt").disabled = !model.has_text;
    limpet.state.onFix = model.has_text ? fixWord : null;
    $("examples").replaceChildren(...model.examples.length ? ["Try as a prompt: "] : [], ...model.examples.map(([name, prompt]) => {
      const button = make("button", "chip", name);
      button.type = "button";
      button.onclick = () => { $("prompt").value = prompt; say("The prompt is filled in: press Run."); };
      return button;
    }));
    for (const box of $("samplers").children) box.follow();
    summarise();
  }

  // The request that the form describes; of each sampler only what differs from its defaults.
  function read() {
    const model = modelNow(), nfe = Number($("nfe").value);
    const samplers = {};
    for (const box of $("samplers").children) {
      const [name, chosen] = box.read();
      let free = name;
      for (let k = 2; Object.hasOwn(samplers, free); k++) free = `${name} ${k}`;
      samplers[free] = paramsOf(chosen.sampler).some((param) => param.name === "nfe") ? { nfe, ...chosen } : chosen;
    }
    const request = { model: model.name, seed: Number($("seed").value), samplers };
    if (model.any_length && $("length").value) request.length = Number($("length").value);
    if ($("prompt").value) request.prompt = $("prompt").value;
    const fixed = [...$("fixed").children].map((row) => row.read());
    if (fixed.length) request.fixed = fixed;
    return request;
  }

  // The address of a request: every field under its own name.
  function addressOf(request) {
    const model = about.models.find((each) => each.name === request.model), query = new URLSearchParams();
    query.set("model", request.model);
    query.set("digest", model.digest.slice(0, 12));
    query.set("seed", request.seed);
    if (request.length) query.set("length", request.length);
    if (request.prompt) query.set("prompt", request.prompt);
    if (request.fixed) query.set("fixed", JSON.stringify(request.fixed));
    query.set("samplers", JSON.stringify(request.samplers));
    return `${location.pathname}?${query}`;
  }

  function restore() {
    const query = new URLSearchParams(location.search);
    if (!query.has("samplers")) return;
    try {
      const model = about.models.find((each) => each.name === query.get("model"));
      if (!model) throw new Error(`this server has no model ${query.get("model")}`);
      const samplers = JSON.parse(query.get("samplers")), fixed = JSON.parse(query.get("fixed") ?? "[]");
      $("model").value = model.name;
      chooseModel();
      $("seed").value = query.get("seed") ?? "";
      if (query.has("length")) $("length").value = query.get("length");
      $("prompt").value = query.get("prompt") ?? "";
      for (const each of fixed) addFixed(Number(each.position) + 1, String(each.text));
      $("fixing").open = fixed.length > 0;
      putSamplers(samplers);
      const other = query.get("digest") && !model.digest.startsWith(query.get("digest"));
      if (other) warn(`This link was made with other weights of ${model.name} (${query.get("digest")}, here ${model.digest.slice(0, 12)}): its texts will differ.`);
      say("The form is filled in from the link: press Run.");
    } catch (error) {
      complain(`This link cannot be read: ${error.message}.`);
    }
  }

  // A run

  const say = (text) => { $("status").textContent = text; };
  const warn = (text) => { $("notice").textContent = text; };
  const complain = (text) => { $("problem").textContent = text; };
  const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`.replace(/\.\.$/, ".");
  const GONE = `The server at ${location.host} does not answer. Start it again (limpet serve), then press Run; the frames stay here.`;

  // Set the text of the Run button, and whether it can be pressed.
  function show(work) {
    $("run").textContent = work || "Run";
    $("run").setAttribute("aria-disabled", String(Boolean(work)));
    $("stop").disabled = !work;
  }

  async function run(request) {
    const controller = running = new AbortController();
    hasRun = true;
    performance.mark("run");
    complain("");
    show("Sending …");
    say("");
    try {
      const answer = await fetch("api/compare", {
        method: "POST", signal: controller.signal, body: JSON.stringify(request),
        headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      });
      if (!answer.ok) {
        const { error } = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
        throw new Error(error);
      }
      history.replaceState(null, "", addressOf(request));
      const calls = Math.max(...Object.values(request.samplers).map((values) => values.nfe ?? 0));
      let ended = false, received = 0;
      for await (const [kind, data] of events(answer.body)) {
        if (kind === "queued") {
          show("Waiting …");
          say(data.ahead === 1 ? "One run is ahead of this one." : `${data.ahead} runs are ahead of this one.`);
        }
        if (kind === "begin") {
          $("intro").hidden = true;
          limpet.begin(data.trajectories);
          if ($("viewer").getBoundingClientRect().top > innerHeight * 0.7) $("viewer").scrollIntoView();
        }
        if (kind === "frame") {
          limpet.extend(data.trajectories);
          show("Running …");
          say(`${Math.min(++received, calls || received)} of ${calls || "?"} calls`);
        }
        if (kind === "end") { limpet.end(data.trajectories); ended = true; say("Done."); }
        if (kind === "error") throw new Error(data.error);
      }
      if (!ended) throw new TypeError("the stream ended early");
    } catch (error) {
      limpet.halt();
      say(controller.signal.aborted ? "Stopped." : "");
      // fetch and its stream throw a TypeError when the server cannot be reached.
      if (!controller.signal.aborted) complain(error instanceof TypeError ? GONE : sentence(error.message));
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
  $("nfe").addEventListener("input", () => { for (const box of $("samplers").children) box.follow(); });
  $("seed").value = about.seed;
  $("length").max = limits.length;
  $("seed").max = limits.seed;
  $("model").onchange = chooseModel;
  $("reseed").onclick = () => { $("seed").value = Math.floor(Math.random() * 1e6); };
  $("fix").onclick = () => addFixed();
  $("add").onclick = addNextPreset;
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
  $("form").addEventListener("invalid", () => { $("setup").open = true; }, true); // so that the wrong field is visible
  $("setup").open = !limpet.narrow.matches;
  chooseModel();
  restore(); // a link fills the form in and starts nothing
  if (!$("samplers").children.length) putSamplers(about.samplers);
  const recorded = new URLSearchParams(location.search).has("samplers") ? [] : about.recorded; // a run of what the form says, where there is one
  $("recorded").hidden = !recorded.length;
  $("unrecorded").hidden = Boolean(recorded.length);
  if (recorded.length) limpet.open(recorded, () => !hasRun).then(() => {
    if (hasRun) return;
    limpet.fixHeight();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) limpet.go(Infinity);
    else limpet.play();
  });
})();
