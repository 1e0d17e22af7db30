// Generate over gRPC from Node, with stubs made of the protos, and read the reason of a refusal.
//
//     npm install --prefix examples/clients/node
//     node examples/clients/node/generate.js 127.0.0.1:50051

const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const protos = path.join(__dirname, '..', '..', '..', 'proto');
const definition = loader.loadSync('tandem/v1/inference.proto', {
  includeDirs: [protos], keepCase: true, longs: Number, enums: String, defaults: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).tandem.v1;

// Prints the deltas of one choice and returns the last message, which has the usage.
async function generate(client, request) {
  let last;
  for await (const message of client.Generate(request, { deadline: Date.now() + 120_000 })) {
    last = message;
    for (const delta of message.deltas) process.stdout.write(delta.text);
  }
  process.stdout.write('\n');
  return last;
}

async function main(address) {
  const client = new Inference(address, grpc.credentials.createInsecure());
  try {
    const last = await generate(client, {
      text: 'def read_lines(path):\n',
      sampling: { temperature: 0 },
      stop: { max_tokens: 24, ignore_eos: true },
    });
    console.log(`${last.summary.usage.completion_tokens} tokens`);
    await generate(client, { text: 'def f():\n', sampling: { temperature: 7 } });
  } catch (error) {
    console.log(`${grpc.status[error.code]}: ${error.metadata.get('tandem-reason')[0]}`);
  } finally {
    client.close();
  }
}

main(process.argv[2]);
