// Draws the curves of logged metrics with uPlot. All charts show the same steps: drag over a chart, or use the fields
// above, to select them; a double click shows all. The legend has the values under the pointer.
"use strict";
{
  const HEIGHT = 220;
  const NAMED = 8; // a chart with more curves has no legend, and names the curve under the pointer

  const data = document.getElementById("charts-data");
  const { legend, panels: every } = data ? JSON.parse(data.textContent) : { legend: [], panels: [] };
  const panels = every.filter((panel) => panel.x.length);
  const steps = panels.flatMap((panel) => [panel.x[0], panel.x[panel.x.length - 1]]);
  const whole = [Math.min(...steps), Math.max(...steps)];
  const first = document.getElementById("charts-first");
  const last = document.getElementById("charts-last");
  const average = document.getElementById("charts-average");
  const hidden = new Set(); // labels of the runs whose curves are not shown
  let drawn = []; // {panel, chart, plot} of the charts on the page
  let range = whole;

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function text(value) {
    if (value == null) return "-";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  }

  // A number beside an axis, for which there is less room: 5e-5 and not 5.000e-5.
  function tick(value) {
    const short = Number(value.toPrecision(4));
    const size = Math.abs(short);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? short.toExponential() : String(short);
  }

  // The lines of a panel. A curve with an average is two: its values, lighter and not in the legend, and the average,
  // for which the legend shows the values.
  function lines(panel) {
    const found = [];
    for (const curve of panel.series) {
      const style = { label: curve.label, show: !hidden.has(curve.label), stroke: curve.colour, dash: curve.dash, width: 2, spanGaps: true };
      const values = curve.values;
      if (curve.low) {
        // the ends of the intervals, between which the chart is shaded
        const end = { show: style.show, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        found.push({ values: curve.high, style: end, behind: true, band: curve.colour + "33" });
        found.push({ values: curve.low, style: end, behind: true });
      }
      if (curve.average && average.checked) {
        const faint = { show: style.show, stroke: curve.colour + "66", width: 1, spanGaps: true, points: { show: false } };
        const value = (chart, v, i, at) => text(at == null ? null : values[at]);
        found.push({ values, style: faint, behind: true });
        found.push({ values: curve.average, style: { ...style, value, points: { show: false } } });
      } else {
        const points = { show: panel.x.length < 8 || "low" in curve };
        found.push({ values, style: { ...style, value: (chart, v) => text(v), points } });
      }
    }
    return found;
  }

  function axis(more) {
    const line = colour("--line");
    return { stroke: colour("--soft"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, ...more };
  }

  // The ends of an axis for values between two numbers. Charts of one value have room on both sides of it.
  function around(chart, min, max) {
    if (min == null) return [0, 1];
    if (min === max) return min === 0 ? [0, 1] : [min - Math.abs(min) / 10, max + Math.abs(max) / 10];
    return uPlot.rangeNum(min, max, 0.08, false);
  }

  // Steps were selected in a chart: show them in all.
  function selected(chart) {
    const { left, width } = chart.select;
    if (width > 0) show([chart.posToVal(left, "x"), chart.posToVal(left + width, "x")]);
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  function draw(panel, plot) {
    const all = lines(panel);
    const several = panel.series.length > NAMED;
    const near = document.createElement("p");
    near.className = "soft near";

    // A click on a name in the legend hides a curve: hide its values and its intervals too.
    function together(chart, i, options) {
      if (several && "focus" in options) {
        const found = i == null || !options.focus ? null : all[i - 1];
        const at = chart.cursor.idx;
        near.textContent = found && at != null ? found.style.label + ": " + text(found.values[at]) : "";
      }
      for (let k = i - 1; k > 0 && all[k - 1].behind && "show" in options; k--) chart.setSeries(k, { show: options.show });
    }

    const options = {
      width: plot.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false, range: (chart, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) }, y: { range: around } },
      axes: [
        axis({ incrs: [1, 2, 5, 10, 20, 50].concat([2, 3, 4, 5, 6].flatMap((p) => [10 ** p, 2 * 10 ** p, 5 * 10 ** p])) }),
        axis({ size: 56, values: (chart, ticks) => ticks.map(tick) }),
      ],
      series: [{ label: "step" }, ...all.map((line) => line.style)],
      bands: all.flatMap((line, i) => (line.band ? [{ series: [i + 1, i + 2], fill: line.band }] : [])),
      legend: { show: !several },
      focus: { alpha: several ? 0.25 : 1 },
      cursor: {
        focus: { prox: several ? 30 : -1 },
        sync: { key: "steps", filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
        drag: { setScale: false },
        bind: { dblclick: () => () => show(whole) },
      },
      hooks: {
        setSeries: [together],
        setSelect: [selected],
      },
    };
    const chart = new uPlot(options, [panel.x, ...all.map((line) => line.values)], plot);
    const rows = chart.root.querySelectorAll(".u-legend .u-series");
    all.forEach((line, i) => line.behind && rows[i + 1] && (rows[i + 1].hidden = true));
    if (several) chart.root.append(near);
    if (legend.length) chart.root.classList.add("runs"); // their names are in the legend above all charts
    return chart;
  }

  // Show the steps between both ends in all charts.
  function show(ends) {
    range = ends;
    first.value = Math.round(range[0]);
    last.value = Math.round(range[1]);
    for (const one of drawn) one.chart.setScale("x", { min: range[0], max: range[1] });
  }

  function add(panel, place) {
    const figure = document.createElement("figure");
    const title = document.createElement("figcaption");
    const unit = document.createElement("span");
    const plot = document.createElement("div");
    title.textContent = panel.title;
    unit.className = "soft";
    unit.textContent = panel.ylabel;
    title.append(" ", unit);
    figure.append(title, plot);
    place.append(figure);
    const one = { panel, plot, chart: draw(panel, plot) };
    drawn.push(one);
    new ResizeObserver(() => one.chart.setSize({ width: plot.clientWidth, height: HEIGHT })).observe(plot);
  }

  function redraw() {
    for (const one of drawn) {
      one.chart.destroy();
      one.chart = draw(one.panel, one.plot);
    }
    show(range);
  }

  // A legend of the runs, for all charts. A click on a name hides its curves.
  function names() {
    const place = document.getElementById("charts-legend");
    for (const run of legend) {
      const button = document.createElement("button");
      const dot = document.createElement("span");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      dot.className = "dot";
      dot.style.background = run.colour;
      button.append(dot, run.label);
      button.addEventListener("click", () => {
        if (!hidden.delete(run.label)) hidden.add(run.label);
        button.setAttribute("aria-pressed", String(!hidden.has(run.label)));
        redraw();
      });
      place.append(button);
    }
    place.hidden = !legend.length;
  }

  if (panels.length) {
    names();
    const more = document.getElementById("charts-more");
    const others = panels.filter((panel) => !panel.important);
    for (const panel of panels.filter((one) => one.important)) add(panel, document.getElementById("charts"));
    more.hidden = !others.length;
    more.addEventListener("toggle", () => {
      for (const panel of others.splice(0)) add(panel, more.lastElementChild);
      show(range);
    });
    for (const field of [first, last]) {
      field.addEventListener("change", () => {
        const ends = [Number(first.value), Number(last.value)];
        if (first.value !== "" && last.value !== "" && ends[0] < ends[1]) show(ends);
      });
    }
    average.addEventListener("change", redraw);
    document.getElementById("charts-all").addEventListener("click", () => show(whole));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    document.getElementById("charts-tools").hidden = false;
    show(whole);
  }
}
