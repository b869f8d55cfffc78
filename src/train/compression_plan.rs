//! How a rank sends each tensor of its parameters.

use std::ops::Range;

use super::compression_memory::MemoryNeeds;
use super::compression_rules::CompressionRules;
use super::compression_schedule::CompressionSchedule;
use crate::codec::Compression;

/// How a rank sends the gradients of the parameters that it holds, or the changes of these parameters.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct CompressionPlan {
    /// Consecutive ranges of the rank's vector of parameters, from its start to its end.
    pub(crate) tensors: Vec<PlannedTensor>,
    /// The seed of random numbers, the same on all ranks.
    pub(crate) seed: u64,
    /// What ranks remember from one sum to the next: the same on all ranks.
    pub(crate) memory: MemoryNeeds,
    pub(crate) schedule: CompressionSchedule,
}

/// The part of a tensor that a rank holds.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct PlannedTensor {
    /// The range in the rank's vector of parameters.
    pub(crate) range: Range<usize>,
    /// The number of rows and of columns, for [`Compression::PowerSgd`]. A kernel of a convolution is a matrix with a row for
    /// each output.
    pub(crate) matrix: (usize, usize),
    pub(crate) is_statistic: bool,
    /// The compression after the warm-up.
    pub(crate) compression: Compression,
}

/// A tensor of the model, for which [`CompressionPlan::new`] chooses a compression.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ModelTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// Whether the elements are running statistics. These are exact, because a variance must not become negative.
    pub(crate) is_statistic: bool,
    /// The range in the rank's vector of parameters: the whole tensor, or empty if another rank holds it.
    pub(crate) own_range: Range<usize>,
}

impl CompressionPlan {
    /// Creates the plan of a rank for all tensors of a model. If `is_encoded` is false, everything is exact. The plan has no
    /// warm-up and no momentum.
    ///
    /// # Errors
    ///
    /// If a pattern of `rules` matches no tensor.
    pub(crate) fn new(
        (default, rules): (Compression, &CompressionRules),
        tensors: Vec<ModelTensor>,
        (is_encoded, seed): (bool, u64),
    ) -> Result<Self, String> {
        let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        rules.check_all_match(&names)?;
        let mut memory = MemoryNeeds::default();
        let mut planned = Vec::new();
        for ModelTensor { name, shape, is_statistic, own_range } in tensors {
            let rows = shape.first().copied().unwrap_or(1).max(1);
            let columns = shape.iter().product::<usize>() / rows;
            let compression = match rules.compression_of(&name, &shape, default) {
                _ if !is_encoded || is_statistic => Compression::None,
                // The factors must be smaller than the matrix.
                Compression::PowerSgd(rank) if usize::from(rank) * (rows + columns) >= rows * columns => {
                    Compression::None
                }
                compression => compression,
            };
            memory.residuals |= compression.needs_error_feedback();
            memory.results |= compression.adds_last_result();
            memory.factors |= matches!(compression, Compression::PowerSgd(_));
            memory.calls |= compression.is_random() || compression.needs_error_feedback();
            if !own_range.is_empty() {
                let matrix = (rows, columns);
                planned.push(PlannedTensor { range: own_range, matrix, is_statistic, compression });
            }
        }
        Ok(Self { tensors: planned, seed, memory, schedule: CompressionSchedule::default() })
    }

    /// Sets how the compression changes during the run.
    pub(crate) fn with_schedule(mut self, schedule: CompressionSchedule) -> Self {
        self.schedule = schedule;
        self.memory.velocities = schedule.has_velocities();
        self
    }

    /// Returns a plan that sends `count` parameters exactly.
    #[cfg(test)]
    pub(crate) fn exact(count: usize) -> Self {
        let (matrix, compression) = ((1, count), Compression::None);
        let whole = PlannedTensor { range: 0..count, matrix, is_statistic: false, compression };
        let (memory, schedule) = (MemoryNeeds::default(), CompressionSchedule::default());
        Self { tensors: vec![whole], seed: 0, memory, schedule }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::StrategySpec;

    /// Returns the compressions of the tensors of a model in words, such as `int8 none`. The model has weights of 60x30, biases
    /// of 60, weights of 10x60 and biases of 10.
    fn compressions(rules: &CompressionRules, default: &str) -> Result<String, String> {
        let shapes: [(&str, &[usize]); 4] = [
            ("layers.0.weight", &[60, 30]),
            ("layers.0.bias", &[60]),
            ("layers.1.weight", &[10, 60]),
            ("layers.1.bias", &[10]),
        ];
        let mut end = 0;
        let tensor = |(name, shape): (&str, &[usize])| {
            let start = end;
            end += shape.iter().product::<usize>();
            let (name, shape) = (name.to_owned(), shape.to_vec());
            ModelTensor { name, shape, is_statistic: false, own_range: start..end }
        };
        let tensors = shapes.map(tensor).to_vec();
        let plan = CompressionPlan::new((default.parse().unwrap(), rules), tensors, (true, 1))?;
        let names: Vec<String> = plan.tensors.iter().map(|tensor| tensor.compression.to_string()).collect();
        Ok(names.join(" "))
    }

    #[test]
    fn small_tensors_stay_exact_unless_a_rule_names_them() {
        let rule = |pattern: &str, name: &str| (pattern.to_owned(), name.parse().unwrap());
        let rules = |tensors: &[(String, Compression)], elements_min| CompressionRules {
            tensors: tensors.to_vec(),
            elements_min,
        };
        let default = CompressionRules::default();
        for (rules, name, expected) in [
            (default.clone(), "int8", "int8 none none none"),
            (rules(&[], 600), "topk:0.01", "topk:0.01 none topk:0.01 none"),
            (rules(&[], 1), "int4", "int4 none int4 none"),
            (rules(&[], 0), "int4", "int4 int4 int4 int4"),
            (rules(&[rule("layers.0", "none")], 600), "int8", "none none int8 none"),
            (rules(&[rule("*.weight", "bf16")], 600), "int8", "bf16 none bf16 none"),
            (
                rules(&[rule("1.bias", "fp16"), rule("layers.1.*", "int4")], 600),
                "int8",
                "int8 none int4 fp16",
            ),
            (default.clone(), "none", "none none none none"),
            (default.clone(), "powersgd:4", "powersgd:4 none none none"),
            // 20 x (60 + 30) = 1800 elements are as many as the matrix has.
            (default, "powersgd:20", "none none none none"),
        ] {
            assert_eq!(compressions(&rules, name).unwrap(), expected, "{name}, {rules:?}");
        }
        let error = compressions(&rules(&[rule("conv", "none")], 0), "int8").unwrap_err();
        assert!(error.contains("`conv`") && error.contains("its tensors are layers.0.weight, "), "{error}");
        for pattern in ["", "a[", "***"] {
            let rules = rules(&[rule(pattern, "none")], 0);
            assert!(rules.check_options(Compression::Bf16, StrategySpec::AllReduce).is_err(), "{pattern}");
        }
    }
}
