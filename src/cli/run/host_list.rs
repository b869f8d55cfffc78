//! The grammar of lists of hosts: `HOST`, `HOST:N`, `HOST slots=N`, and Slurm's `n[1-3,7]`.

use std::net::IpAddr;

/// The maximal number of hosts that one entry may stand for.
const EXPANDED_HOSTS_MAX: usize = 4096;

/// A host, and its number of ranks if the user has given one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct HostEntry {
    pub(super) name: String,
    pub(super) slots: Option<u32>,
}

/// Splits a list at its commas, except at commas in brackets.
pub(super) fn split_hosts(list: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    let is_separator = move |c: char| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    };
    list.split(is_separator).map(str::trim).filter(|entry| !entry.is_empty()).collect()
}

/// Parses one entry of `--host`, or one line of a hostfile without its comment.
pub(super) fn parse_host_line(line: &str) -> Result<Vec<HostEntry>, String> {
    let mut words = line.split_whitespace();
    let (host, mut slots) = split_slots(words.next().unwrap_or_default());
    let mut max_slots = None;
    for word in words {
        match word.split_once('=') {
            Some(("slots", number)) => slots = Some(number),
            Some(("max_slots" | "max-slots", number)) => max_slots = Some(number),
            _ => return Err(format!("`{line}`: `{word}` is unknown; write HOST, HOST:N or HOST slots=N")),
        }
    }
    // As in Open MPI, `max_slots` counts only if there is no `slots`.
    let slots = slots.or(max_slots);
    let parse = |text: &str| text.parse().map_err(|_| format!("`{line}`: `{text}` is not a number of ranks"));
    let slots = slots.map(parse).transpose()?;
    let mut names = Vec::new();
    expand_brackets("", host, &mut names).map_err(|reason| format!("`{line}`: {reason}"))?;
    names
        .into_iter()
        .map(|name| {
            if is_host_name(&name) {
                Ok(HostEntry { name, slots })
            } else {
                Err(format!("`{line}`: `{name}` is not the name of a host"))
            }
        })
        .collect()
}

/// Splits `HOST:N`. An IPv6 address has colons too. With a number of ranks, it needs brackets: `[fe80::1]:2`.
fn split_slots(word: &str) -> (&str, Option<&str>) {
    if let Some((address, rest)) = word.strip_prefix('[').and_then(|rest| rest.split_once(']'))
        && address.parse::<IpAddr>().is_ok()
    {
        return (address, rest.strip_prefix(':'));
    }
    match word.rsplit_once(':') {
        Some((host, slots)) if word.parse::<IpAddr>().is_err() => (host, Some(slots)),
        _ => (word, None),
    }
}

/// Appends all names that `rest` stands for, each after `prefix`, to `names`.
fn expand_brackets(prefix: &str, rest: &str, names: &mut Vec<String>) -> Result<(), String> {
    let Some((before, after)) = rest.split_once('[') else {
        names.push(format!("{prefix}{rest}"));
        return if names.len() > EXPANDED_HOSTS_MAX {
            Err("it names too many hosts".to_owned())
        } else {
            Ok(())
        };
    };
    let (ranges, after) = after.split_once(']').ok_or("the bracket `[` is not closed")?;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let parse = |text: &str| -> Result<u32, String> {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse()
                .ok()
                .filter(|_| is_number)
                .ok_or_else(|| format!("`{range}` is not a range such as 1-3"))
        };
        let (low, high) = (parse(first)?, parse(last)?);
        if low > high {
            return Err(format!("the range `{range}` ends before it begins"));
        }
        // As in Slurm, `01-10` has leading zeros.
        let width = first.len();
        for number in low..=high {
            expand_brackets(&format!("{prefix}{before}{number:0width$}"), after, names)?;
        }
    }
    Ok(())
}

/// Returns whether `name` can be a name or address of a host, perhaps with `USER@`. ssh would read a name that begins with `-`
/// as an option.
fn is_host_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-@:%".contains(c);
    !name.is_empty() && !name.starts_with('-') && name.chars().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_an_entry_is_parsed() {
        for (list, expected) in [
            ("a", "a"),
            ("a:2, b", "a:2 b"),
            ("a slots=3", "a:3"),
            ("a slots=2 max_slots=4", "a:2"),
            ("a max_slots=4", "a:4"),
            ("u@a.example:2", "u@a.example:2"),
            ("n[1-3,7]", "n1 n2 n3 n7"),
            ("n[08-10]-ib:2,m", "n08-ib:2 n09-ib:2 n10-ib:2 m"),
            ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
            ("10.0.0.1:2,::1,[fe80::1]:4", "10.0.0.1:2 ::1 fe80::1:4"),
            (",a,,", "a"),
        ] {
            let entries = split_hosts(list).into_iter().flat_map(|entry| parse_host_line(entry).unwrap());
            let text =
                |HostEntry { name, slots }| slots.map_or(name.clone(), |slots| format!("{name}:{slots}"));
            assert_eq!(entries.map(text).collect::<Vec<_>>().join(" "), expected, "{list}");
        }
    }

    #[test]
    fn wrong_entries_are_refused_with_a_reason() {
        for (entry, part) in [
            ("a:x", "`x` is not a number of ranks"),
            ("a:-1", "`-1` is not a number of ranks"),
            ("a slots=", "`` is not a number of ranks"),
            ("a cpus=2", "`cpus=2` is unknown"),
            ("-oProxyCommand=x", "is not the name of a host"),
            ("a;b", "is not the name of a host"),
            ("n[1-", "not closed"),
            ("n[3-1]", "ends before it begins"),
            ("n[1-x]", "not a range"),
            ("n[+1]", "not a range"),
            ("n[0-9999999]", "too many hosts"),
            (":2", "is not the name of a host"),
        ] {
            let error = parse_host_line(entry).expect_err(entry);
            assert!(error.contains(part), "{entry}: {error}");
        }
    }
}
