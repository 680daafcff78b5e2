// A reader of checkpoints in JavaScript, written from docs/format.md alone: Node's standard library only.
// Prints as JSON what an index holds, every stored range of it checked: node reader.mjs FOLDER [INDEX]
import fs from 'node:fs';
import path from 'node:path';
import zlib from 'node:zlib';

const need = (fact, what) => { if (!fact) throw new Error(what); };
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const cut = (sequence, lengths) => {
  let at = 0;
  const pieces = lengths.map((length) => sequence.slice(at, (at += length)));
  need(at === sequence.length, 'lengths do not add up');
  return pieces;
};

// Sections 2 and 3: the footer, and the manifest as columns.
function openManifest(file) {
  const data = fs.readFileSync(file);
  const footer = data.subarray(data.length - 64);
  need(footer.subarray(0, 8).toString('latin1') === '\x93DCPMAN\n', 'no footer');
  need(footer.subarray(60).toString('latin1') === 'DCP\x93', 'no footer');
  need(zlib.crc32(footer.subarray(0, 56)) === footer.readUInt32LE(56), 'bad footer');
  need([1, 2, 3].includes(footer.readUInt16LE(8)), 'another major version');
  const offset = Number(footer.readBigUInt64LE(16));
  const length = Number(footer.readBigUInt64LE(24));
  need(offset + length + 64 === data.length, 'bad size');
  need(zlib.crc32(data.subarray(0, offset)) === footer.readUInt32LE(32), 'bad head');
  const blob = data.subarray(offset, offset + length);
  need(zlib.crc32(blob) === footer.readUInt32LE(36), 'bad manifest');
  const start = 8 + Number(blob.readBigUInt64LE(0));
  const header = JSON.parse(blob.subarray(8, start).toString());
  const about = JSON.parse(header.__metadata__['dcp-manifest']);
  delete header.__metadata__;
  const raw = (name) => blob.subarray(start + header[name].data_offsets[0], start + header[name].data_offsets[1]);
  const stored = (name) => {
    const bytes = raw(name);
    const width = { U8: 1, U16: 2, U32: 4, U64: 8 }[header[name].dtype];
    const wide = (number) => (number <= Number.MAX_SAFE_INTEGER ? Number(number) : number);  // a step down is a BigInt
    return Array.from({ length: bytes.length / width }, (_, n) =>
      width === 8 ? wide(bytes.readBigUInt64LE(n * 8)) : bytes.readUIntLE(n * width, width));
  };
  const column = (name, count) => {
    const numbers = name in about.rows ? runs(name, about.rows[name]) : stored(name);
    if (numbers.length === 1) return Array(count).fill(numbers[0]);
    need(numbers.length === count, `bad column ${name}`);
    return numbers;
  };
  const runs = (name, count) => {
    const parts = ['repeats', 'length', 'first', 'step', 'jump'].map((part) => column(`${name}.${part}`, count));
    const [repeats, length, first, step, jump] = parts;
    return first.flatMap((start, run) => Array.from({ length: repeats[run] }, (_, piece) =>
      Array.from({ length: length[run] }, (__, n) => Number(BigInt.asUintN(64,
        BigInt(start) + BigInt(piece) * BigInt(jump[run]) + BigInt(n) * BigInt(step[run])))))).flat(2);
  };
  const strings = (name, count) => cut(raw(`${name}.text`), column(`${name}.bytes`, count)).map((part) => part.toString());
  const names = Object.keys(header).filter((name) => name !== 'block_crcs');
  names.sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)));
  const crcs = names.flatMap((name) =>
    Array.from({ length: Math.ceil(raw(name).length / 65536) }, (_, n) =>
      zlib.crc32(raw(name).subarray(n * 65536, (n + 1) * 65536))));
  need(JSON.stringify(crcs) === JSON.stringify(stored('block_crcs')), 'bad block');
  need(zlib.crc32(raw('block_crcs'), zlib.crc32(blob.subarray(0, start))) === footer.readUInt32LE(40), 'bad index CRC');
  return { about, rows: about.rows, has: (name) => name in header, raw, stored, column, strings };
}

// Section 4, items: where the stored ranges are, and their bytes.
function readItems(manifest, table, sizes, folder, order = sizes.map((_, row) => row)) {
  const count = manifest.rows[table];
  const column = (name) => manifest.column(`${table}.${name}`, count);
  const files = manifest.strings('file', manifest.rows.file);
  const leads = manifest.column('frame.lead', manifest.rows.frame);
  const [file, position, frame, framing] = ['file', 'position', 'frame', 'framing'].map(column);
  const [chain, checked, crcs] = ['chain', 'checked', 'crc32'].map(column);
  const encoded = manifest.has(`${table}.blocks`) ? column('blocks') : Array(count).fill(0);
  const step = (n) => Math.min(Math.max(Math.ceil(n / 131072) * 4096, 65536), 1048576);
  const borders = sizes.map((n, row) => (checked[row] && !encoded[row] ? Math.max(0, Math.ceil(n / step(n)) - 1) : 0));
  const pieces = cut(manifest.stored(`${table}.running`), order.map((row) => borders[row]));
  const [crc, running] = [[], []];
  order.forEach((row, n) => { crc[row] = crcs[n]; running[row] = pieces[n]; });
  return sizes.map((size, row) => {
    const begin = position[row] + leads[frame[row]];
    const bytes = fs.readFileSync(path.join(folder, files[file[row]])).subarray(begin, begin + size);
    need(bytes.length === size, 'a file is too short');
    need(!checked[row] || zlib.crc32(bytes) === crc[row], 'a stored range is damaged');
    running[row].forEach((value, n) =>
      need(zlib.crc32(bytes.subarray(0, (n + 1) * step(size))) === value, 'a running CRC is wrong'));
    return { framing: framing[row], chain: chain[row], data: bytes.toString('hex') };
  });
}

// Section 4: tensors with their boxes.
function readTensors(manifest, folder) {
  const count = manifest.rows.tensor;
  const column = (name) => manifest.column(`tensor.${name}`, count);
  const [kinds, owners, flags, ndims, chunks] = ['dtype', 'owner', 'flags', 'ndim', 'chunks'].map(column);
  const dtypes = manifest.strings('dtype', manifest.rows.dtype);
  const widths = manifest.column('dtype.item_bytes', manifest.rows.dtype);
  const rowOf = chunks.flatMap((number, row) => Array(number).fill(row));
  const boxes = rowOf.map(() => [[], []]);
  for (let dim = 0; dim < Math.max(0, ...ndims); dim += 1) {
    const deep = boxes.filter((_, chunk) => ndims[rowOf[chunk]] > dim);
    const offsets = manifest.column(`chunk.offset.${dim}`, deep.length);
    const sizes = manifest.column(`chunk.size.${dim}`, deep.length);
    deep.forEach((box, n) => { box[0].push(offsets[n]); box[1].push(sizes[n]); });
  }
  let items = null;
  if (manifest.about.stored.includes('chunk')) {
    const sizes = manifest.has('chunk.stored_bytes')
      ? manifest.column('chunk.stored_bytes', boxes.length)
      : boxes.map((box, chunk) => box[1].reduce((a, b) => a * b, widths[kinds[rowOf[chunk]]]));
    const places = chunks.flatMap((number) => Array.from({ length: number }, (_, place) => place));
    const order = sizes.map((_, row) => row);
    if ('level' in manifest.rows) order.sort((a, b) => places[a] - places[b]);
    items = cut(readItems(manifest, 'chunk', sizes, folder, order), chunks);
  }
  const shapes = cut(manifest.column('tensor.shape', sum(ndims)), ndims);
  const own = cut(boxes, chunks);
  return manifest.strings('tensor.name', count).map((name, row) => ({
    name, owner: owners[row], dtype: dtypes[kinds[row]], flags: flags[row], shape: shapes[row], boxes: own[row],
    items: items === null ? null : items[row],
  }));
}

const [folder, index = '.metadata'] = process.argv.slice(2);
const manifest = openManifest(path.join(folder, index));
const objects = manifest.rows.object;
const aliases = manifest.column('alias.target', manifest.rows.alias);
console.log(JSON.stringify({
  info: manifest.about.info,
  tensors: readTensors(manifest, folder),
  objects: manifest.strings('object.name', objects).map((name, row) => ({
    name, owner: manifest.column('object.owner', objects)[row],
  })),
  object_items: manifest.about.stored.includes('object')
    ? readItems(manifest, 'object', manifest.column('object.stored_bytes', objects), folder) : [],
  aliases: Object.fromEntries(manifest.strings('alias.name', manifest.rows.alias).map((name, n) => [name, aliases[n]])),
}));
