// The dispatcher and the routing tables once more, for the interactive page. The tests of the site
// compare both with minilora/graphs/dispatcher.py and minilora/ops/kernel_meta.py.

const MOST_PIECEWISE_TOKENS = 512;

// 1, 2, 4, then steps of 8 to 256, then of 16; the limit is always the last.
export function defaultSizes(limit) {
  const sizes = [1, 2, 4];
  for (let size = 8; size <= 256; size += 8) sizes.push(size);
  for (let size = 272; size <= limit; size += 16) sizes.push(size);
  return [...sizes.filter((size) => size < limit), limit];
}

function counts(options, rows) {
  const bound = Math.min(options.maxLoras, rows, options.maxNumSeqs);
  if (bound === 0) return [0];
  const powers = [];
  for (let count = 1; count < bound; count *= 2) powers.push(count);
  const captured = options.specializeActiveLora ? [...powers, bound] : [bound];
  return options.specializeLora ? [0, ...captured] : captured;
}

// Returns {FULL: Map(rows -> counts), PIECEWISE: Map(rows -> counts)}.
export function captureKeys(options) {
  const full = ["full", "full_and_piecewise"].includes(options.graphMode);
  const piecewise = ["piecewise", "full_and_piecewise"].includes(options.graphMode);
  const { maxNumSeqs, maxNumBatchedTokens, captureSizes } = options;
  const sizes = (limit, most) =>
    captureSizes ? captureSizes.filter((size) => size <= most) : defaultSizes(limit);
  const keys = { FULL: new Map(), PIECEWISE: new Map() };
  const fullSizes = full ? sizes(maxNumSeqs, maxNumSeqs) : [];
  for (const rows of fullSizes) keys.FULL.set(rows, counts(options, rows));
  const covered = fullSizes.length ? fullSizes[fullSizes.length - 1] : 0;
  const limit = Math.min(maxNumBatchedTokens, MOST_PIECEWISE_TOKENS);
  for (const rows of piecewise ? sizes(limit, maxNumBatchedTokens) : []) {
    // A step that is not uniform has a request with two rows or more.
    const requests = covered < Math.min(rows, maxNumSeqs) ? rows : rows - 1;
    if (requests === 0) continue;
    const all = counts(options, requests);
    const most = all[all.length - 1];
    keys.PIECEWISE.set(rows, full ? all.filter((count) => count === 0 || count === most) : all);
  }
  return keys;
}

// Returns {mode, rows, groups} of the smallest graph with room, or of mode "NONE".
export function dispatch(options, keys, rows, adapters, uniform) {
  for (const mode of uniform ? ["FULL", "PIECEWISE"] : ["PIECEWISE"]) {
    for (const [size, captured] of keys[mode]) {
      const groups = captured.find((count) => count >= adapters);
      if (size >= rows && groups !== undefined) return { mode, rows: size, groups };
    }
  }
  const eager = options.maxLoras ? counts(options, options.maxLoras) : [0];
  return { mode: "NONE", rows, groups: eager.find((count) => count >= adapters) };
}

// Returns the five tables for the slot of each real row (-1: none), padded to `rows` rows.
export function kernelMeta(mapping, rows, maxLoras) {
  const padded = [...mapping, ...Array(rows - mapping.length).fill(-1)];
  const order = padded.map((_, row) => row);
  const key = (row) => (padded[row] < 0 ? maxLoras : padded[row]);
  const sorted = [...order].sort((a, b) => key(a) - key(b) || a - b);
  const active = [...new Set(mapping.filter((slot) => slot >= 0))].sort((a, b) => a - b);
  const perGroup = active.map((slot) => mapping.filter((other) => other === slot).length);
  const fill = (values, value, length) => [
    ...values,
    ...Array(length - values.length).fill(value),
  ];
  const starts = [0];
  for (const count of fill(perGroup, 0, maxLoras)) starts.push(starts[starts.length - 1] + count);
  return {
    token_lora_mapping: padded,
    token_indices_sorted_by_lora_ids: sorted,
    active_lora_ids: fill(active, -1, maxLoras),
    num_tokens_per_lora: fill(perGroup, 0, maxLoras),
    lora_token_start_loc: starts,
  };
}
