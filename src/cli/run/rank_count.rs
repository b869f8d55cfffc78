//! The value of `-n`.

/// The number of ranks to start, as the user typed it.
#[derive(Clone, Copy, Debug)]
pub(super) enum RankCount {
    Auto,
    Number(i64),
}

impl std::str::FromStr for RankCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            // `cpu` is torchrun's name for `auto`.
            "auto" | "cpu" => Ok(Self::Auto),
            "gpu" => Err("ringrun does not count GPUs; give the number of ranks".to_owned()),
            _ => text.parse().map(Self::Number).map_err(|_| "neither a number nor auto".to_owned()),
        }
    }
}
