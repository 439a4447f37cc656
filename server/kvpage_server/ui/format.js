// Numbers as people read them. GiB is 2^30 bytes.

export const GIB = 2 ** 30;
const UNITS = [["TiB", 2 ** 40], ["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const number = (value) => whole.format(value);

export function bytes(value) {
  for (const [unit, size] of UNITS) {
    if (value >= size) return `${Number((value / size).toPrecision(4))} ${unit}`;
  }
  return `${value} B`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.001 ? 2 : 1)} %`;

/** Beyond a thousand nobody reads what stands behind the point. */
export const decimal = (value, digits = value < 1000 ? 2 : 0) => value.toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: digits });

/** "3 min 20 s" */
export function seconds(value) {
  const all = Math.floor(value);
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  if (all < 86400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
  return `${Math.floor(all / 86400)} d ${Math.floor((all % 86400) / 3600)} h`;
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
