//! Reads Slurm's lists of nodes, such as `login,node[01-16,20],rack[1-2]n[0-3]`.

/// What a job needs to know of the list of its nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct NodeList {
    /// The name of the first node, which has rank 0.
    pub(super) first: String,
    /// Whether the list has more than one node.
    pub(super) has_several: bool,
}

/// Parses a list of names that are separated by commas. A name may contain any number of brackets with numbers and
/// ranges of numbers, which stand for one name each. Returns `None` if the list is invalid.
pub(super) fn parse_node_list(text: &str) -> Option<NodeList> {
    let mut nodes = split_at_commas(text)?.into_iter().map(parse_names);
    let first = nodes.next()??;
    let others: Vec<NodeList> = nodes.collect::<Option<_>>()?;
    Some(NodeList { has_several: first.has_several || !others.is_empty(), ..first })
}

/// Splits a list at the commas outside of brackets. Returns `None` if the brackets do not match.
fn split_at_commas(text: &str) -> Option<Vec<&str>> {
    let (mut parts, mut start, mut is_in_brackets) = (Vec::new(), 0, false);
    for (at, letter) in text.char_indices() {
        match letter {
            '[' | ']' if is_in_brackets == (letter == '[') => return None,
            '[' | ']' => is_in_brackets = letter == '[',
            ',' if !is_in_brackets => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    (!is_in_brackets).then_some(parts)
}

/// Parses one element of the list, whose brackets match.
fn parse_names(text: &str) -> Option<NodeList> {
    let is_name =
        |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'));
    let mut parts = text.split('[');
    let mut names =
        NodeList { first: parts.next().filter(|part| is_name(part))?.to_owned(), has_several: false };
    for part in parts {
        let (numbers, rest) = part.split_once(']').filter(|(_, rest)| is_name(rest))?;
        let (first, has_several) = parse_numbers(numbers)?;
        names.first.push_str(first);
        names.first.push_str(rest);
        names.has_several |= has_several;
    }
    (!names.first.is_empty()).then_some(names)
}

/// Parses the text in brackets, such as `001-004,7`. Returns the first number, with its zeros, and whether there are
/// more.
fn parse_numbers(text: &str) -> Option<(&str, bool)> {
    let mut all = Vec::new();
    for range in text.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let parse =
            |number: &str| number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse::<u64>());
        let (from, to) = (parse(low)?.ok()?, parse(high)?.ok()?);
        if from > to {
            return None;
        }
        all.push((low, from < to));
    }
    let &(first, is_range) = all.first()?;
    Some((first, is_range || all.len() > 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_node_of_a_list_is_found() {
        for (text, first, has_several) in [
            ("n7", "n7", false),
            ("node-1.cluster", "node-1.cluster", false),
            ("b,a", "b", true),
            ("n[3]", "n3", false),
            ("n[001-016,20]", "n001", true),
            ("n[5,7-9],login", "n5", true),
            ("rack[2]n[0-3]-ib", "rack2n0-ib", true),
            ("a[1-1]", "a1", false),
            ("login,n[1-2]", "login", true),
        ] {
            let expected = NodeList { first: first.into(), has_several };
            assert_eq!(parse_node_list(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn an_invalid_list_is_refused() {
        for text in [
            "", ",", "a,", "n[", "n]", "n[]", "n[1", "n[[1]]", "n[2-1]", "n[x]", "n[1-]", "n[-1]", "n[+1]",
            "a b", "n[1]]",
        ] {
            assert_eq!(parse_node_list(text), None, "{text}");
        }
    }
}
