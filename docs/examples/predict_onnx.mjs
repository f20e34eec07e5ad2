// Classify images with a file of `vit export` in Node.js: npm install onnxruntime-node sharp
//
//     node predict_onnx.mjs model.onnx cat.jpg dog.png
//
// In a browser: import "onnxruntime-web", fetch the bytes of the model, and take the pixels from a
// canvas without their alpha channel. The rest is the same.
import { readFile } from "node:fs/promises";
import ort from "onnxruntime-node";
import sharp from "sharp";

// The metadata of an ONNX file. onnxruntime's JavaScript API does not return it, so it is read from
// the protobuf message: each field 14 of the model is an entry, with key (field 1) and value (2).
function metadata(bytes) {
  const found = {};
  for (const [field, entry] of fields(bytes)) {
    if (field === 14) {
      const { 1: name, 2: value } = Object.fromEntries(fields(entry));
      found[new TextDecoder().decode(name)] = new TextDecoder().decode(value);
    }
  }
  return found;
}

// The length-delimited fields of a protobuf message: [field number, bytes].
function* fields(bytes) {
  let place = 0;
  const number = () => {
    for (let value = 0, unit = 1; ; unit *= 128) {
      value += (bytes[place] & 127) * unit;
      if (bytes[place++] < 128) return value;
    }
  };
  while (place < bytes.length) {
    const tag = number();
    const length = [() => (number(), 0), () => 8, number, null, null, () => 4][tag & 7]();
    if ((tag & 7) === 2) yield [tag >> 3, bytes.subarray(place, place + length)];
    place += length;
  }
}

// An image at its own size, rotated by its EXIF orientation, RGB, transparency over white:
// uint8 [1, height, width, 3]. The network in the file resizes and normalises it.
async function pixels(path) {
  const image = sharp(path).rotate().flatten({ background: "white" }).toColourspace("srgb");
  const { data, info } = await image.removeAlpha().raw().toBuffer({ resolveWithObject: true });
  if (info.channels !== 3) throw new Error(`${path}: ${info.channels} channels instead of 3`);
  return new ort.Tensor("uint8", new Uint8Array(data), [1, info.height, info.width, 3]);
}

const [model, ...paths] = process.argv.slice(2);
const classes = JSON.parse(metadata(await readFile(model)).classes);
const session = await ort.InferenceSession.create(model);
for (const path of paths) {
  const { probabilities } = await session.run({ images: await pixels(path) }, ["probabilities"]);
  const scores = probabilities.data;
  const best = [...scores.keys()].sort((a, b) => scores[b] - scores[a]).slice(0, 5);
  const predictions = best.map((i) => ({ label: classes[i], score: scores[i] }));
  console.log(JSON.stringify({ image: path, predictions }));
}
