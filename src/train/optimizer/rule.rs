//! The rules by which optimizers update parameters.

use std::fmt;

/// The rule by which parameters are updated. In the formulas, p is a parameter, g its gradient, v its velocity, and
/// lr the learning rate. See `docs/optimizers.md` for all formulas.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rule {
    /// p -= lr g.
    Sgd,
    /// v = momentum v + g; p -= lr v. `PyTorch`'s `SGD(momentum=...)` has the same definition.
    Momentum {
        /// The fraction of the velocity that each step keeps: at least 0 and below 1.
        momentum: f32,
    },
    /// v = momentum v + g; p -= lr (g + momentum v). `PyTorch`'s `SGD(momentum=..., nesterov=True)` has the same definition
    /// (Sutskever et al. 2013).
    Nesterov {
        /// The fraction of the velocity that each step keeps: at least 0 and below 1.
        momentum: f32,
    },
    /// Nesterov's accelerated gradient method: v = m v - lr g; p += m' v - lr g. m is the momentum of this step, and
    /// m' the momentum of the next step. After k steps, the momentum is k / (k + 3). The momentum is reset to 0 when
    /// v points uphill (O'Donoghue and Candès 2015). Use this rule for convex losses with the whole training set as
    /// one batch. The default learning rate is 1 / (the largest curvature) and needs no tuning.
    Accelerated,
    /// Adam (Kingma and Ba 2015). Weight decay adds `weight_decay * p` to the gradient.
    Adam(AdamOptions),
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    AdamW(AdamOptions),
    /// LAMB (You et al. 2020), for large batches: Adam, but the step of each tensor is scaled to the norm of the
    /// tensor.
    Lamb(AdamOptions),
    /// LARS (You, Gitman and Ginsburg 2017), for large batches: momentum, but the gradient of each tensor is scaled
    /// to the norm of the tensor.
    Lars {
        /// The fraction of the velocity that each step keeps: at least 0 and below 1.
        momentum: f32,
    },
}

/// The constants of [`Rule::Adam`], [`Rule::AdamW`] and [`Rule::Lamb`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamOptions {
    /// The decay rate of the moving average of gradients: at least 0 and below 1.
    pub beta_1: f64,
    /// The decay rate of the moving average of squared gradients: at least 0 and below 1.
    pub beta_2: f64,
    /// A number above 0 that is added to the root of the moving average of squared gradients, so that no step divides
    /// by 0.
    pub epsilon: f64,
}

impl AdamOptions {
    /// The constants of the paper by Kingma and Ba, and the defaults of `PyTorch`.
    pub const DEFAULT: Self = Self { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8 };
}

impl Default for AdamOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Writes the betas and the epsilon, as in `0.9,0.999 and 0.00000001`.
impl fmt::Display for AdamOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{} and {}", self.beta_1, self.beta_2, self.epsilon)
    }
}

impl Rule {
    /// Returns the name of the rule on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Momentum { .. } => "momentum",
            Self::Nesterov { .. } => "nesterov",
            Self::Accelerated => "accelerated",
            Self::Adam(_) => "adam",
            Self::AdamW(_) => "adamw",
            Self::Lamb(_) => "lamb",
            Self::Lars { .. } => "lars",
        }
    }

    /// Returns the names of the state vectors that the rule keeps between steps.
    pub fn state_names(self) -> &'static [&'static str] {
        match self {
            Self::Sgd => &[],
            Self::Momentum { .. } | Self::Nesterov { .. } | Self::Accelerated | Self::Lars { .. } => {
                &["optimizer.velocity"]
            }
            Self::Adam(_) | Self::AdamW(_) | Self::Lamb(_) => {
                &["optimizer.first_moment", "optimizer.second_moment"]
            }
        }
    }

    /// Returns the momentum of [`Rule::Momentum`], [`Rule::Nesterov`] and [`Rule::Lars`], and `None` for other rules.
    pub fn momentum(self) -> Option<f32> {
        match self {
            Self::Momentum { momentum } | Self::Nesterov { momentum } | Self::Lars { momentum } => {
                Some(momentum)
            }
            _ => None,
        }
    }

    /// Returns the constants of [`Rule::Adam`], [`Rule::AdamW`] and [`Rule::Lamb`], and `None` for other rules.
    pub fn adam_options(self) -> Option<AdamOptions> {
        match self {
            Self::Adam(options) | Self::AdamW(options) | Self::Lamb(options) => Some(options),
            _ => None,
        }
    }

    /// Returns whether the step of a parameter depends on the gradients of its whole tensor.
    pub fn needs_whole_tensors(self) -> bool {
        matches!(self, Self::Lamb(_) | Self::Lars { .. })
    }

    /// Returns whether the step of each parameter is independent of all other parameters and their gradients.
    pub fn updates_elements_independently(self) -> bool {
        !self.needs_whole_tensors() && self != Self::Accelerated
    }

    /// Returns the default weight decay: 0.01 for `AdamW` (as in `PyTorch`) and LAMB (as in the paper), 0.0005 for LARS
    /// (as in the paper), and 0 for the other rules.
    pub fn default_weight_decay(self) -> f32 {
        match self {
            Self::AdamW(_) | Self::Lamb(_) => 0.01,
            Self::Lars { .. } => 0.0005,
            _ => 0.0,
        }
    }
}
