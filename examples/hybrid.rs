//! Data and pipeline parallelism combined. The ranks form a grid with a row for each copy of the model and a column for each
//! stage. Each row is a pipeline. The ranks of a column hold the same stage and average its gradients.
//!
//! ```sh
//! ringrun -n 4 target/release/examples/hybrid
//! ```

use ringtrain::{Group, Rank, ReduceOp};

/// The number of stages of the model.
const DEPTH: u32 = 2;
/// The number of samples per batch in each copy of the model.
const ROWS: usize = 64;
/// The tags of the two kinds of messages.
const ACTIVATIONS: u32 = 1;
const GRADIENTS: u32 = 2;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut world = Group::from_environment()?;
    if world.size().get() % DEPTH != 0 {
        return Err(format!("{DEPTH} stages do not divide {} ranks", world.size()).into());
    }
    let (copy, stage) = (world.rank().get() / DEPTH, world.rank().get() % DEPTH);
    let copies = world.size().get() / DEPTH;
    // `pipeline` holds the ranks of this copy of the model, in the order of the stages. `column` holds the ranks of this stage.
    let pipeline = world.split(Some(copy), i64::from(stage))?.ok_or("every rank is in a pipeline")?;
    let mut column = world.split(Some(stage), i64::from(copy))?.ok_or("every rank is in a column")?;

    // The model is y = b * tanh(a * x + c). The first stage holds a and c, and the second stage holds b.
    let mut parameters = if stage == 0 { vec![0.1f32, 0.0] } else { vec![0.5f32] };
    let mut loss = 0.0;
    for step in 0..1000usize {
        let inputs = shard(step, copy as usize);
        let mut gradients = vec![0.0f32; parameters.len()];
        if stage == 0 {
            let hidden: Vec<f32> =
                inputs.iter().map(|x| (parameters[0] * x + parameters[1]).tanh()).collect();
            pipeline.send(&hidden, Rank::new(1), ACTIVATIONS)?;
            let mut deltas = vec![0.0f32; ROWS];
            pipeline.receive(&mut deltas, Rank::new(1), GRADIENTS)?;
            for ((x, h), delta) in inputs.iter().zip(&hidden).zip(&deltas) {
                let through = delta * (1.0 - h * h);
                gradients[0] += through * x;
                gradients[1] += through;
            }
        } else {
            let mut hidden = vec![0.0f32; ROWS];
            pipeline.receive(&mut hidden, Rank::ZERO, ACTIVATIONS)?;
            let errors: Vec<f32> =
                hidden.iter().zip(&inputs).map(|(h, x)| parameters[0] * h - target(*x)).collect();
            let deltas: Vec<f32> = errors.iter().map(|error| error * parameters[0]).collect();
            pipeline.send(&deltas, Rank::ZERO, GRADIENTS)?;
            gradients[0] = errors.iter().zip(&hidden).map(|(error, h)| error * h).sum();
            loss = errors.iter().map(|error| error * error).sum::<f32>() / ROWS as f32;
        }
        column.all_reduce(&mut gradients, ReduceOp::Average)?;
        for (parameter, gradient) in parameters.iter_mut().zip(&gradients) {
            *parameter -= gradient / ROWS as f32;
        }
    }
    let results = world.all_gather_object(&(stage, parameters, loss))?;
    if world.rank() == Rank::ZERO {
        for (stage, parameters, loss) in &results {
            let first = results.iter().find(|other| other.0 == *stage).map(|other| &other.1);
            assert_eq!(Some(parameters), first, "all copies of a stage have the same parameters");
            assert!(*loss < 1e-3, "the model learns: {loss}");
        }
        println!("{copies} x {DEPTH} ranks: {:?} {:?}", results[0].1, results[1].1);
    }
    Ok(())
}

/// Returns the part of the step's batch that this copy of the model processes.
fn shard(step: usize, copy: usize) -> Vec<f32> {
    (0..ROWS).map(|row| (((step * 31 + copy * 17 + row) * 37) % 199) as f32 / 99.5 - 1.0).collect()
}

/// Returns the value that the model must learn for the input `x`.
fn target(x: f32) -> f32 {
    1.5 * (0.8 * x + 0.2).tanh()
}
