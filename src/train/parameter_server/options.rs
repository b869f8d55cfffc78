//! The options of the public parameter server.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::train::optimizer::Rule;

/// The settings of a [`ParameterServer`]. All ranks must pass the same settings.
///
/// [`ParameterServer`]: crate::train::ParameterServer
#[derive(Clone, PartialEq, Debug)]
pub struct ParameterServerOptions {
    /// The number of servers: ranks `0..servers` hold parameters. All other ranks are workers.
    pub servers: NonZeroU32,
    /// The rule with which servers apply gradients. Servers refuse [`Rule::Accelerated`].
    pub rule: Rule,
    /// The range of each tensor in the vector of all parameters. The ranges must be ascending, and each parameter must be in
    /// one range. Only [`Rule::Lamb`] and [`Rule::Lars`] use the tensors. With these rules, a server holds whole tensors.
    /// If empty, all parameters are one tensor.
    pub tensors: Vec<Range<usize>>,
    /// The learning rate at the start. Workers can change it with [`set_learning_rate`].
    ///
    /// [`set_learning_rate`]: crate::train::ParameterServer::set_learning_rate
    pub learning_rate: f32,
    /// The weight decay, as in [`Optimizer`](crate::train::optimizer::Optimizer::weight_decay).
    pub weight_decay: f32,
    /// If true, a server waits in each step for the gradients of all workers, and applies their mean. If false, a server
    /// applies each gradient as soon as the gradient arrives.
    pub synchronous: bool,
    /// The maximum staleness of a gradient. The staleness is the number of updates between the pull of the parameters
    /// and the push of the gradient. Servers drop gradients with a larger staleness. `None` means no maximum.
    /// Synchronous servers ignore this setting, because their gradients always have a staleness of 0.
    pub staleness: Option<u64>,
    /// If true, a server divides the learning rate by the staleness of the gradient that it applies. Gradients with a
    /// staleness of 0 or 1 keep the full learning rate.
    pub staleness_aware: bool,
}

impl Default for ParameterServerOptions {
    /// One asynchronous server that applies SGD with a learning rate of 0.01.
    fn default() -> Self {
        Self {
            servers: NonZeroU32::MIN,
            rule: Rule::Sgd,
            tensors: Vec::new(),
            learning_rate: 0.01,
            weight_decay: 0.0,
            synchronous: false,
            staleness: None,
            staleness_aware: false,
        }
    }
}

impl ParameterServerOptions {
    /// Checks the options for a model of `count` parameters. Returns the tensors that have elements if servers must hold whole
    /// tensors, and otherwise `None`. The error text says what to change.
    pub(super) fn whole_tensors(&self, count: usize) -> Result<Option<Vec<Range<usize>>>, String> {
        let &Self { rule, servers, ref tensors, .. } = self;
        if rule == Rule::Accelerated {
            return Err(
                "a parameter server cannot use the optimizer accelerated; use another optimizer".into()
            );
        }
        if !rule.needs_whole_tensors() {
            return Ok(None);
        }
        if tensors.is_empty() && servers.get() > 1 {
            let name = rule.name();
            return Err(format!(
                "several servers need the tensors for the optimizer {name}; set ParameterServerOptions::tensors, or use 1 server"
            ));
        }
        let all = 0..count;
        let tensors = if tensors.is_empty() { std::slice::from_ref(&all) } else { &tensors[..] };
        let mut end = 0;
        for tensor in tensors {
            if tensor.start != end || tensor.end < end {
                return Err(format!(
                    "the tensor {tensor:?} must begin at {end}, where the previous tensor ends, and may not end before it begins"
                ));
            }
            end = tensor.end;
        }
        if end != count {
            return Err(format!("the tensors end at {end}, but there are {count} parameters"));
        }
        Ok(Some(tensors.iter().filter(|tensor| !tensor.is_empty()).cloned().collect()))
    }
}
