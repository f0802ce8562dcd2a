// Tokens per second of each lane over the last minutes, drawn by uPlot.

const SECONDS = 300, SECONDS_MIN = 30;
const times = [];
const series = new Map(); // lane -> values
let plot = null;
let drawn = "";

const color = (index) => getComputedStyle(document.documentElement).getPropertyValue(`--c${index % 6}`).trim();
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function add(at, rates) {
  times.push(at);
  for (const name of rates.keys()) if (!series.has(name)) series.set(name, times.slice(1).map(() => null));
  for (const [name, values] of series) values.push(rates.get(name) ?? null);
  while (times[0] < at - SECONDS) {
    times.shift();
    for (const values of series.values()) values.shift();
  }
  draw();
}

const span = () => {
  const last = times.at(-1);
  return { min: last - Math.min(SECONDS, Math.max(SECONDS_MIN, last - times[0])), max: last };
};

function draw() {
  const place = document.getElementById("chart");
  const data = [times, ...series.values()];
  const names = [...series.keys()].join("\n");
  if (plot && drawn === names) {
    plot.setData(data, false);
    plot.setScale("x", span());
    return;
  }
  if (plot) plot.destroy();
  drawn = names;
  const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false } };
  plot = new uPlot({
    width: place.clientWidth, height: 200, legend: { live: false },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(10, high * 1.1)] } },
    axes: [{ ...axis, size: 30, space: 70, values: (_, at) => at.map((one) => new Date(1000 * one).toLocaleTimeString("en-GB")) }, { ...axis, size: 52 }],
    series: [{}, ...[...series.keys()].map((label, index) => ({
      label, stroke: color(index), width: 2, points: { show: false }, spanGaps: false,
    }))],
  }, data, place);
  plot.setScale("x", span());
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawn = ""; if (plot) draw(); });
new ResizeObserver(() => {
  const place = document.getElementById("chart");
  if (plot && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: 200 });
}).observe(document.getElementById("chart"));
