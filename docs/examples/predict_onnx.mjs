// Label images with a file of `vit export`, in node:
//
//     ONNXRUNTIME_NODE_INSTALL=skip npm install onnxruntime-node sharp
//     node predict_onnx.mjs model.onnx cat.jpg dog.png
//
// Without the variable, on Linux, the installation also downloads libraries for NVIDIA GPUs from
// NuGet, and fails where that cannot be reached.
//
// In a browser, import "onnxruntime-web", fetch the model's bytes, and take the pixels from a
// canvas, without every fourth byte; the rest stays as it is.
import { readFile } from "node:fs/promises";
import ort from "onnxruntime-node";
import sharp from "sharp";

// What the file says of itself. onnxruntime's JavaScript does not tell, but it is plain protobuf:
// field 14 of the model, of which field 1 is a name and field 2 its value.
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

// Upright, RGB over white, as it is: uint8 [1, height, width, 3].
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
  const image = await pixels(path).catch((error) => error);
  if (image instanceof Error) {
    console.error(`${path}: ${image.message}`);
    process.exitCode = 1;
    continue;
  }
  const { probabilities } = await session.run({ images: image }, ["probabilities"]);
  const scores = probabilities.data;
  const best = [...scores.keys()].sort((a, b) => scores[b] - scores[a]).slice(0, 5);
  const predictions = best.map((i) => ({ label: classes[i], score: scores[i] }));
  console.log(JSON.stringify({ image: path, predictions }));
}
