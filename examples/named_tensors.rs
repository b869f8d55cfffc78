//! Reduces gradients that are ready in a different order on each rank.
//!
//! The layers finish in a different order on each rank, as when a framework computes them in parallel. The ranks submit the
//! gradients by name, and all ranks receive the same averages.
//!
//! ```sh
//! ringrun -n 4 target/release/examples/named_tensors
//! ```

use rand::seq::SliceRandom as _;
use ringtrain::{Group, NamedOptions, NamedTensors, Rank, ReduceOp};

const LAYERS: usize = 50;
const STEPS: usize = 10;

fn main() -> anyhow::Result<()> {
    let mut group = Group::from_environment()?;
    let rank = group.rank();
    let tensors = NamedTensors::new(&mut group, NamedOptions::default())?;
    let mut checksum = 0.0;
    for step in 0..STEPS {
        let mut order: Vec<usize> = (0..LAYERS).collect();
        order.shuffle(&mut rand::rng());
        let mut handles = Vec::new();
        for layer in order {
            let gradients = vec![(rank.get() as usize + layer * step) as f32; 10 * (layer + 1)];
            handles
                .push((layer, tensors.all_reduce(&format!("layer{layer}"), gradients, ReduceOp::Average)?));
        }
        handles.sort_by_key(|(layer, _)| *layer);
        for (layer, handle) in handles {
            checksum += f64::from(handle.wait()?[0]) * (layer + 1) as f64;
        }
    }
    let statistics = tensors.statistics();
    tensors.close()?;
    let mut first = [checksum];
    group.broadcast(&mut first, Rank::ZERO)?;
    // No rank leaves the job before all ranks have received rank 0's checksum.
    group.barrier()?;
    anyhow::ensure!(first[0] == checksum, "rank {rank} has {checksum}, but rank 0 has {}", first[0]);
    println!(
        "rank {rank} of {}: all results agree; {} tensors in {} operations, {} identified by their cache slot",
        group.size(),
        statistics.tensors,
        statistics.operations,
        statistics.cached
    );
    Ok(())
}
