"use strict";
// The curves of one head, from the closed forms of rfa.dynamics (covariance.py, regimes.py), drawn as SVG by hand.
//
// window.explorer, for tests and for the console:
//   values()  the parameters in use, by name: exactly what is shown beside the sliders
//   curves()  {lag, bias, gate, response} over the lag and {residual, student_t, exponential, gaussian} over the
//             residual, lists of numbers
//   head()    {alpha, regime, peak}: the regime's alpha (-Infinity where the process never settles), its name, and
//             the lag at which the prior response is largest
// Each svg carries the range of its axes as data-x and data-y ("low high"), each curve's path its points in pixels.
(function () {
  const PER_DECADE = 60, POINTS = 257, RESIDUALS = [0.01, 100];
  const BOX = { left: 48, top: 8, width: 300, height: 168 };
  const SVG = "http://www.w3.org/2000/svg";
  const CHARTS = {
    prior: { x: "lag", curves: ["bias"] },
    gate: { x: "lag", curves: ["gate"], from: 0 },
    response: { x: "lag", curves: ["response"], from: 0 },
    weight: { x: "residual", curves: ["student_t", "exponential", "gaussian"], from: 0, to: 1, logarithmic: true },
  };
  const form = document.querySelector(".controls");
  const inputs = [...form.querySelectorAll("input[type=range]")];

  // sliders: equal steps are equal factors; one with zero has it at its left end

  function valueOf(input) {
    const { low, value } = input.dataset, place = Number(input.value);
    if (place === placeOf(input)) return Number(value); // it starts there, between two steps or on one
    if (place === 0 && "zero" in input.dataset) return 0;
    return Number((low * 10 ** (place / PER_DECADE)).toPrecision(3));
  }

  function placeOf(input) {
    return Math.round(PER_DECADE * Math.log10(input.dataset.value / input.dataset.low));
  }

  const values = () => Object.fromEntries(inputs.map((input) => [input.id, valueOf(input)]));

  // closed forms

  function covariance(p, lag) {
    const x = 2 * p.decay * lag; // phi(tau) = tau (1 - exp(-x)) / x, and tau at x = 0
    const accumulated = lag * (x === 0 ? 1 : -Math.expm1(-x) / x);
    return p.process_noise * accumulated + p.key_noise * Math.exp(-x) + p.noise_floor;
  }

  function head(p = values()) {
    const steady = p.decay > 0 ? p.process_noise / (2 * p.decay) : Infinity;
    const alpha = p.key_noise - steady, beta = p.noise_floor + steady;
    const regime = alpha < 0 ? "diffusive" : alpha > 0 ? "integrative" : "balanced";
    return { alpha, regime, peak: alpha > beta ? Math.log(alpha / beta) / (2 * p.decay) : 0 };
  }

  function curves(p = values()) {
    const places = Array.from({ length: POINTS }, (_, k) => k / (POINTS - 1));
    const lag = places.map((place) => place * p.longest);
    const residual = places.map((place) => RESIDUALS[0] * (RESIDUALS[1] / RESIDUALS[0]) ** place);
    const variance = lag.map((tau) => covariance(p, tau));
    const judged = covariance(p, p.at) + p.query_noise, nu = p.robustness;
    return {
      lag,
      bias: variance.map((each) => -Math.log(each)),
      gate: variance.map((each) => 1 / (each + p.query_noise)),
      response: variance.map((each, k) => Math.exp(-p.decay * lag[k]) / each),
      residual,
      student_t: residual.map((r) => Math.exp(-(nu + 1) * Math.log1p(r * r / (nu * judged)))),
      exponential: residual.map((r) => Math.exp(-r * r / (nu * judged))),
      gaussian: residual.map((r) => Math.exp(-r * r / judged)),
    };
  }

  // drawing

  const short = (value) => {
    if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
    const long = value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5);
    const text = long ? value.toExponential(2) : String(Number(value.toPrecision(3)));
    return text.replaceAll("-", "−");
  };

  function range(chart, ys) {
    if ("from" in chart) return [chart.from, chart.to ?? 1.05 * Math.max(...ys)];
    const low = Math.min(...ys), high = Math.max(...ys);
    const room = high - low > 1e-9 ? 0.05 * (high - low) : 0.5; // a constant has rounding errors, not a course
    return [low - room, high + room];
  }

  function ticks([low, high], logarithmic) {
    if (logarithmic) {
      const first = Math.ceil(Math.log10(low)), count = Math.floor(Math.log10(high)) - first + 1;
      return Array.from({ length: count }, (_, k) => 10 ** (first + k));
    }
    const rough = (high - low) / 4, unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
    const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1;
    return Array.from({ length: count }, (_, k) => (first + k) * step);
  }

  function scales(x, y, logarithmic) {
    const along = logarithmic ? Math.log : (value) => value;
    const share = (value, [low, high]) => (value - low) / (high - low);
    return {
      across: (value) => BOX.left + BOX.width * share(along(value), x.map(along)),
      up: (value) => BOX.top + BOX.height * (1 - share(value, y)),
    };
  }

  function element(name, attributes, text = "") {
    const made = document.createElementNS(SVG, name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    made.textContent = text;
    return made;
  }

  function axes(svg, x, y, { across, up }, logarithmic) {
    const right = BOX.left + BOX.width, bottom = BOX.top + BOX.height, marks = [];
    for (const value of ticks(x, logarithmic)) {
      const at = across(value).toFixed(1);
      marks.push(element("line", { class: "grid", x1: at, x2: at, y1: BOX.top, y2: bottom }));
      marks.push(element("text", { class: "below", x: at, y: bottom + 14 }, short(value)));
    }
    for (const value of ticks(y, false)) {
      const at = up(value).toFixed(1);
      marks.push(element("line", { class: "grid", x1: BOX.left, x2: right, y1: at, y2: at }));
      marks.push(element("text", { class: "left", x: BOX.left - 4, y: Number(at) + 4 }, short(value)));
    }
    svg.querySelector(".ticks").replaceChildren(...marks);
  }

  function draw(id, chart, found, peak) {
    const svg = document.getElementById(id), xs = found[chart.x];
    const x = [xs[0], xs[xs.length - 1]], y = range(chart, chart.curves.flatMap((name) => found[name]));
    const scale = scales(x, y, chart.logarithmic);
    svg.dataset.x = x.join(" ");
    svg.dataset.y = y.join(" ");
    axes(svg, x, y, scale, chart.logarithmic);
    for (const name of chart.curves) {
      const points = found[name].map((value, k) => `${scale.across(xs[k]).toFixed(2)},${scale.up(value).toFixed(2)}`);
      svg.querySelector(`[data-curve=${name}]`).setAttribute("d", `M${points.join("L")}`);
    }
    const mark = svg.querySelector(".peak");
    if (mark) {
      const at = scale.across(Math.min(peak, x[1])).toFixed(2);
      mark.setAttribute("x1", at);
      mark.setAttribute("x2", at);
      mark.setAttribute("visibility", peak <= x[1] ? "visible" : "hidden");
    }
  }

  function say(p, { alpha, regime, peak }, shown) {
    for (const input of inputs) {
      const text = short(p[input.id]);
      document.getElementById(`${input.id}-value`).textContent = text;
      input.setAttribute("aria-valuetext", text);
    }
    document.getElementById("setting").textContent =
      inputs.map((input) => `${input.dataset.symbol} = ${short(p[input.id])}`).join(", ");
    const brownian = p.decay === 0 ? ", Brownian: the process never settles" : "";
    const beyond = peak > shown ? " (beyond the lags shown)" : "";
    document.getElementById("regime").textContent =
      `Regime: ${regime}, α = η² − σ²/2μ = ${short(alpha)}${brownian}. Prior response largest at lag ${short(peak)}${beyond}.`;
  }

  function update() {
    const p = values(), found = curves(p), about = head(p);
    Object.entries(CHARTS).forEach(([id, chart]) => draw(id, chart, found, about.peak));
    say(p, about, p.longest);
  }

  function restart(event) {
    event?.preventDefault();
    for (const input of inputs) {
      input.max = Math.round(PER_DECADE * Math.log10(input.dataset.high / input.dataset.low));
      input.value = placeOf(input);
    }
    update();
  }

  form.addEventListener("input", update);
  form.addEventListener("reset", restart);
  form.addEventListener("submit", (event) => event.preventDefault());
  window.explorer = { values, curves: () => curves(), head: () => head() };
  restart();
})();
