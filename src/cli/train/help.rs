//! The text that `ringtrain --help` prints after the options.

pub(super) const AFTER_OPTIONS: &str = "\
Examples:
  ringtrain                                      train on the built-in digits in one process
  ringrun -n 4 ringtrain                         train on the digits in four processes on this machine
  ringtrain --peers hosts.txt --rank 1           run as rank 1 of a job whose hosts are listed in hosts.txt
  ringrun -n 4 ringtrain --data /usr/share/datasets/fashion-mnist --model mlp:256,128 --epochs 10
  ringtrain --data houses.csv --target price --report result.json
  ringtrain --data X.npy,y.npy --model mlp:64 --task regression
  ringtrain --data images.npy,labels.npy --model cnn:conv32x3,pool2,conv64x3,pool2,dense128,dropout0.5
  ringtrain --resume run1                        continue from the last checkpoint in run1, with its options
  ringtrain --config run.toml --epochs 20        take the options of a file, but train for 20 epochs
  ringtrain --checkpoint run1 --resume           continue from the last checkpoint, or start if there is none

Commands (see `ringtrain COMMAND --help`):
  ringtrain predict --model FILE --data new.csv  predict the target of new rows with a model of --save-model FILE
  ringtrain eval --model FILE --data test.csv    compare the predictions of a model with the targets of test data
  ringtrain inspect FILE                         print the content of a model file or a checkpoint
  ringtrain export --model FILE --output M.onnx  convert a model to the ONNX format, which other programs can run

Layers of --model cnn:LAYER,LAYER,... (docs/models.md describes them; the model needs images):
  convCHANNELSxKERNEL  convolution with CHANNELS outputs and a kernel of KERNEL x KERNEL pixels (an odd number), then relu
  poolWINDOW           the largest value of each square of WINDOW x WINDOW pixels
  denseUNITS           fully connected layer, then relu; no convolution and no pooling may follow
  dropoutP             in training, each value becomes 0 with the probability P

Defaults:
  --model       mlp:128 if the target holds classes, linear if it holds numbers
  --task        classification if the target holds text, or if it holds integers with few distinct values; otherwise regression.
                Few means at most 2 values, or at most 100 values with at least 10 rows for each value on average.
                ringtrain prints its choice
  --optimizer   accelerated for linear and softmax on tables of at most 16 million values, unless --batch-size, --schedule,
                --warmup, --scale-lr or --clip-norm is given; otherwise adam
  --batch-size  accelerated: the whole training set; other optimizers: 128
  --epochs      accelerated on the whole training set: until the loss no longer falls, but at most 1000 to 5000
                epochs (the more values the table has, the fewer epochs). Otherwise 40 epochs. If 40 epochs
                have fewer than 480 steps and --batch-size is not given, as many epochs as 480 steps need
  --lr          accelerated: 1 / the largest curvature of the loss, computed from the features (mlp and cnn: 0.01);
                mlp and cnn: adam and adamw 0.001, lamb, momentum and nesterov 0.01, sgd 0.1;
                softmax: adam, adamw, lamb, momentum and nesterov 0.01, sgd 0.1;
                linear: adam and adamw 0.01 (0.001 in runs of at least 10000 steps), lamb 0.01, momentum and nesterov 0.001,
                sgd 0.01

Strategies:
  In each step, every rank uses its part of the batch of --batch-size samples. An epoch uses each sample once.
  allreduce       the parameters agree on all ranks after each step. Only this strategy accepts --bucket-bytes and
                  --optimizer accelerated
  local-sgd, diloco, model-average
                  a step of a rank uses only the gradient of its own part. The parameters agree after the ranks average.
                  ringtrain tests and saves the model only after epochs that end with an average
  ps-sync         the first --servers ranks are servers, and the other ranks are workers. Each worker uses its part of the batch
  ps-async        the same, but each worker uses whole batches. A lost worker does not end the run if you start the job
                  with ringrun --tolerate-failures
  tensor, pipeline, hybrid
                  each rank holds a part of the model and needs less memory. The result is that of allreduce, except for
                  rounding, so --resume may change between these strategies. pipeline needs as many ranks as stages, and hybrid
                  needs PIPELINES times STAGES ranks. Pipelines divide a batch into --micro-batches

With --resume, options that you do not pass are those of the checkpoint. You may change --lr, --epochs, --accumulate,
--micro-batches, --compression, --bucket-bytes, --servers and the number of ranks. All other options of training and data
must be the same as before. Without --lr the run continues with the learning rate of the checkpoint.

If any rank gets SIGTERM or Ctrl-C, all ranks finish the current step, save to --checkpoint, write --report and exit with 0.
The ranks do not evaluate the model after the signal. A second signal ends the process at once.

The ranks compare hashes of their parameters: with allreduce after each epoch, with local-sgd, diloco and model-average after each
epoch that ends with an average. If the hashes differ, the job ends with exit code 16.

Exit codes:
  0  success, also after a signal            8  an operation passed its deadline
  1  any other failure                       9  training diverged: the loss is NaN, infinite, or more than 10
  2  unknown option or bad combination          times that of a constant prediction; or a rank aborted
  3  peers file, secret file, environment   10  checkpoint, report or model cannot be read or written
     or arguments are wrong, or differ      11  the listening port is in use
     between ranks                          12  a peer has another secret
  4  data missing, truncated or wrong       13  a peer has another protocol version
  5  not all ranks started in time          14  a peer broke the protocol
  6  a rank was lost                        16  ranks hold different parameters
  7  ranks called different operations";
