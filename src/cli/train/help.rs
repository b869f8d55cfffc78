//! The text that `ringtrain --help` prints after the options.

pub(super) const AFTER_OPTIONS: &str = "\
Examples:
  ringtrain                                      train on the built-in digits in one process
  ringrun -n 4 ringtrain                         train on the digits with 4 ranks on this machine
  ringtrain --peers hosts.txt --rank 1           join the job whose addresses are in hosts.txt
  ringrun -n 4 ringtrain --data /usr/share/datasets/fashion-mnist --model mlp:256,128 --epochs 10
  ringtrain --data houses.csv --target price --report result.json
  zcat a.csv.gz | ringtrain --data - --target y  train on the table that zcat writes
  ringtrain --data X.npy,y.npy --model mlp:64 --task regression
  ringtrain --data images.npy,labels.npy --model cnn:conv32x3,pool2,conv64x3,pool2,dense128
  ringtrain --data book.txt --model gpt:4,4,128  learn to continue a text (needs a program built
                                                 with cargo build --release --features candle)
  ringtrain --resume run1                        continue from the last checkpoint in run1
  ringtrain --config run.toml --epochs 20        use the options of run.toml, with 20 epochs
  ringtrain --checkpoint run1 --resume           continue from a checkpoint, or start a new run

Commands for model files, which --save-model writes (see `ringtrain COMMAND --help`):
  ringtrain predict --model FILE --data new.csv  predict the targets of new rows
  ringtrain eval --model FILE --data test.csv    compare predictions with the targets of test data
  ringtrain inspect FILE                         print the content of a model file or a checkpoint
  ringtrain export --model FILE --output M.onnx  convert a model to the ONNX format
  ringtrain generate --model FILE --prompt TEXT  let a text model continue TEXT

Layers of --model cnn:LAYER,LAYER,... (only for images; see docs/models.md):
  convCHANNELSxKERNEL  convolution with CHANNELS output channels and KERNEL x KERNEL pixels, then
                       relu; KERNEL is odd
  poolWINDOW           the largest value of each square of WINDOW x WINDOW pixels
  denseUNITS           fully connected layer with UNITS outputs, then relu; no conv or pool layer
                       may follow
  batchnorm            after a conv or dense layer: batch normalization before the relu
  dropoutP             in training, set each value to 0 with probability P
mlp:LAYER,LAYER,... accepts WIDTH (a fully connected layer), batchnorm and dropoutP.

Defaults:
  --model       mlp:128 for classification, linear for regression
  --task        classification if the target holds text or few distinct integers, otherwise
                regression. Few means at most 2 distinct values, or at most 100 with at least 10
                rows for each value on average. ringtrain prints the task
  --optimizer   accelerated for linear and softmax on tables of at most 16 million values, otherwise
                adam. Also adam if you pass --batch-size, --schedule, --warmup, --scale-lr or
                --clip-norm, or a --strategy other than allreduce
  --batch-size  accelerated: the whole training set; texts: 32 windows; otherwise: 128 samples
  --epochs      with accelerated on the whole training set: until the loss no longer falls, but at
                most 1000 (large tables) to 5000 (small tables) epochs. Otherwise: 40 epochs (texts:
                10). If you do not pass --batch-size, ringtrain adds epochs until the run has at
                least 480 steps
  --lr          mlp, cnn, gpt: sgd 0.1; momentum, nesterov, lamb, accelerated 0.01; adam,
                          adamw 0.001
                softmax:  sgd 0.1; momentum, nesterov, lamb, adam, adamw 0.01
                linear:   sgd 0.01; momentum, nesterov 0.001; lamb 0.01; adam, adamw 0.01, but 0.001
                          if the run has at least 10000 steps
                all models: lars 3
                softmax and linear with accelerated: 1 / the largest curvature of the loss

Strategies:
  allreduce                in each step, the ranks sum the gradients of their parts of the batch
  model-average[:EPOCHS]   each rank trains alone; the ranks average their models after every EPOCHS
                           epochs, or once at the end
  local-sgd:STEPS          each rank takes STEPS steps alone, then the ranks average their models
  diloco:STEPS[,DELAY]     as local-sgd, but an outer optimizer with momentum applies the average, and
                           the ranks take DELAY steps (default: half of STEPS) while they average
  ps-sync                  in each step, parameter servers apply the sum of all workers' gradients
  ps-async[:STALENESS]     parameter servers apply each gradient as soon as it arrives, if its
                           staleness is at most STALENESS (default: 16 for each worker)
  gossip[:STEPS]           each rank trains alone, and after every STEPS steps (default: 1) averages
                           its model with the model of a random rank
  tensor                   each rank holds a part of each layer
  pipeline:STAGES          each of STAGES ranks holds some layers
  hybrid:PIPELINESxSTAGES  PIPELINES pipelines of STAGES ranks share each batch

Only allreduce accepts --optimizer accelerated, --reproducible and --shard-optimizer. All other \
strategies ignore --bucket-bytes BYTES and --no-overlap, and refuse --bucket-bytes auto. With \
model-average, local-sgd and diloco, the ranks have equal parameters only after an average, so \
ringtrain tests the model only after epochs that end with an average, and saves it only at an average.

With ps-sync, each worker uses its part of each batch. With ps-async, each worker uses whole \
batches. The staleness of a gradient is the number of updates since its worker received the \
parameters. With gossip, a fast rank takes more steps than a slow rank, and the ranks have equal \
parameters only at the end. To let a job continue after it has lost a worker (ps-async) or any rank \
(gossip), start the job with ringrun --tolerate-failures.

With tensor, pipeline and hybrid, each rank needs less memory than with allreduce. The results of \
tensor, pipeline, hybrid and allreduce differ only by rounding.

With --resume, ringtrain takes from the checkpoint all options that you do not pass. You may \
change --lr, --epochs, --patience, --accumulate, --micro-batches, --compression (and its rules), --bucket-bytes, --servers, \
--shard-optimizer and the number of ranks. You may also change between the strategies allreduce, tensor, pipeline and \
hybrid. The paths of --data and --test-data may change if the samples stay the same, and the directory \
of --stream may change, and --replicate-data too. All other options of training and data must stay the same. Without --lr, the \
run continues with the learning rate of the checkpoint.

If any rank gets SIGTERM or Ctrl-C, all ranks stop after the current step, write the files of \
--checkpoint, --report, --plot, --html and --save-model, and exit with 0. Without --checkpoint and --save-model, \
the trained parameters are lost. The ranks do not test the model again. A second signal ends the process \
at once. With some strategies, the ranks stop a little later:
  local-sgd, diloco, model-average
             after about 0.5 s or two steps, whichever takes longer. The ranks then average their models
  ps-async   each worker completes its batch. Rank 0 waits at most 1 s for these gradients
  gossip     when the batches in progress are complete. The ranks then average their models

With allreduce and hybrid, ranks that hold the same parameters compare hashes of these parameters after \
each epoch. With local-sgd, diloco and model-average, the ranks compare hashes before each test of the \
model. If the hashes differ, the job ends with exit code 16.

Exit codes:
  0   the run is complete, or SIGTERM or Ctrl-C stopped it
  1   a failure that has no code of its own
  2   an option is unknown or has a wrong value, or options do not fit together
  3   the peers file, the secret file or the environment is wrong, or ranks have different
      arguments
  4   data is missing, truncated or wrong
  5   not all ranks started in time
  6   a rank was lost
  7   ranks called different operations
  8   an operation took longer than --timeout
  9   training diverged: the loss is NaN, infinite, or more than 10 times the loss of a constant
      prediction
  10  a checkpoint, a report or a model file cannot be read or written
  11  the listening port is in use
  12  another rank has a different secret
  13  another rank has a different protocol version
  14  another rank broke the protocol
  16  ranks that must have equal parameters have different parameters";
