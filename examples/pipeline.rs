//! Pipeline parallelism: every rank holds one layer of a deep network. Micro-batches go forward from rank to rank, and gradients
//! go back. Several micro-batches are in flight at a time (Huang et al., "`GPipe`", `NeurIPS` 2019).
//!
//! ```sh
//! ringrun -n 4 target/release/examples/pipeline
//! ```

use ringtrain::{Group, Rank};

const WIDTH: usize = 16;
const MICRO_BATCHES: u32 = 8;
/// The number of samples in a micro-batch.
const ROWS: usize = 32;
/// The tags of the two kinds of messages.
const FORWARD: u32 = 1;
const BACKWARD: u32 = 2;

/// A layer that scales and shifts each feature.
struct Layer {
    scale: Vec<f32>,
    shift: Vec<f32>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = Group::from_environment()?;
    let (rank, last) = (group.rank().get(), group.size().get() - 1);
    let (previous, next) = (Rank::new(rank.saturating_sub(1)), Rank::new(rank + 1));
    let mut layer = Layer { scale: vec![1.0; WIDTH], shift: vec![0.0; WIDTH] };
    let (mut first_loss, mut loss) = (0.0, 0.0);
    for step in 0..200u32 {
        let mut inputs = Vec::new();
        let mut sent = Vec::new();
        let mut deltas = Vec::new();
        loss = 0.0;
        for micro in 0..MICRO_BATCHES {
            let mut input = vec![0.0f32; ROWS * WIDTH];
            if rank == 0 {
                input = batch(step, micro);
            } else {
                group.receive(&mut input, previous, FORWARD)?;
            }
            let output = layer.forward(&input);
            inputs.push(input);
            if rank == last {
                // The target of every feature is a linear function of the input.
                let target = batch(step, micro).into_iter().map(|x| 0.5 * x + 0.25);
                let delta: Vec<f32> = output.iter().zip(target).map(|(y, t)| y - t).collect();
                loss += delta.iter().map(|d| d * d).sum::<f32>() / delta.len() as f32;
                deltas.push(delta);
            } else {
                sent.push(group.send_async(output, next, FORWARD)?);
            }
        }
        let mut gradient = Layer { scale: vec![0.0; WIDTH], shift: vec![0.0; WIDTH] };
        for micro in 0..MICRO_BATCHES as usize {
            let mut delta = vec![0.0f32; ROWS * WIDTH];
            if rank == last {
                delta = std::mem::take(&mut deltas[micro]);
            } else {
                group.receive(&mut delta, next, BACKWARD)?;
            }
            let back = layer.backward(&inputs[micro], &delta, &mut gradient);
            if rank > 0 {
                sent.push(group.send_async(back, previous, BACKWARD)?);
            }
        }
        ringtrain::wait_all(sent)?;
        layer.step(&gradient, 0.5 / (MICRO_BATCHES as usize * ROWS) as f32);
        if step == 0 {
            first_loss = loss;
        }
    }
    if rank == last {
        println!("{} stages: loss {first_loss:.4} at the first step, {loss:.6} at the last", group.size());
        assert!(loss < first_loss / 50.0, "the pipeline learns");
    }
    Ok(())
}

impl Layer {
    fn forward(&self, input: &[f32]) -> Vec<f32> {
        input.iter().enumerate().map(|(i, x)| x * self.scale[i % WIDTH] + self.shift[i % WIDTH]).collect()
    }

    /// Adds the gradient of the parameters to `gradient`, and returns the derivative with respect to the input.
    fn backward(&self, input: &[f32], delta: &[f32], gradient: &mut Self) -> Vec<f32> {
        for (i, (x, d)) in input.iter().zip(delta).enumerate() {
            gradient.scale[i % WIDTH] += x * d;
            gradient.shift[i % WIDTH] += d;
        }
        delta.iter().enumerate().map(|(i, d)| d * self.scale[i % WIDTH]).collect()
    }

    fn step(&mut self, gradient: &Self, rate: f32) {
        for (value, slope) in self.scale.iter_mut().zip(&gradient.scale) {
            *value -= rate * slope;
        }
        for (value, slope) in self.shift.iter_mut().zip(&gradient.shift) {
            *value -= rate * slope;
        }
    }
}

/// Returns the inputs of a micro-batch: values from -1 to 1, the same on every rank.
fn batch(step: u32, micro: u32) -> Vec<f32> {
    let start = (step * MICRO_BATCHES + micro) as usize * ROWS * WIDTH;
    (start..start + ROWS * WIDTH).map(|i| ((i * 7919) % 2003) as f32 / 1001.5 - 1.0).collect()
}
