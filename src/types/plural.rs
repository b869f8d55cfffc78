//! Counts with their nouns in messages.

use std::fmt::Display;

/// Returns a count and its noun, for example `1 rank` or `4 ranks`. The plural of `noun` must end in one more `s`; for other
/// words, see [`plural`].
pub fn counted(count: impl Display, noun: &str) -> String {
    let count = count.to_string();
    let ending = plural(&count, "", "s");
    format!("{count} {noun}{ending}")
}

/// Returns `one` if the count is 1, and otherwise `many`.
pub fn plural<'a>(count: impl Display, one: &'a str, many: &'a str) -> &'a str {
    if count.to_string() == "1" { one } else { many }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::WorldSize;

    #[test]
    fn only_one_has_the_singular() {
        assert_eq!(
            [0, 1, 2, 11].map(|count| counted(count, "rank")),
            ["0 ranks", "1 rank", "2 ranks", "11 ranks"]
        );
        assert_eq!(counted(WorldSize::ONE, "rank"), "1 rank");
        assert_eq!([1, 2].map(|count| plural(count, "row has", "rows have")), ["row has", "rows have"]);
    }
}
