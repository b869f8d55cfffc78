//! Collectives on memory.

use pyo3::prelude::*;
use ringtrain::{Compression, DType, Element, Error, ForeignBuffer, ReduceOp};

use crate::dtype::{Kind, with_type};
use crate::errors;
use crate::group::Group;
use crate::handle::{Handle, Outcome};
use crate::messages::reduction;
use crate::region::Region;

/// A buffer of Python's.
type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// What elements are reduced as, and by what.
fn reduced(py: Python<'_>, kind: Kind, op: &str) -> PyResult<(DType, ReduceOp)> {
    let op = reduction(py, op)?;
    kind.reduced(op).ok_or_else(|| errors::unsupported(py, format!("{op} on {} is not defined", kind.name())))
}

fn alike(py: Python<'_>, output: &Region, input: &Region) -> PyResult<()> {
    if output.kind == input.kind {
        return Ok(());
    }
    let (output, input) = (output.kind.name(), input.kind.name());
    Err(errors::invalid(py, format!("the input's elements are {input}, the output's {output}")))
}

/// The output, with the input's elements in it if there is an input.
fn place(output: Any<'_, '_>, input: Option<Any<'_, '_>>) -> PyResult<(Region, Option<Region>)> {
    let py = output.py();
    let output = Region::writable(output)?;
    let Some(input) = input else { return Ok((output, None)) };
    let input = Region::of(input)?;
    alike(py, &output, &input)?;
    if output.count != input.count {
        let (output, input) = (output.count, input.count);
        return Err(errors::invalid(py, format!("the input has {input} elements, the output {output}")));
    }
    Ok((output, Some(input)))
}

/// Counts of elements as counts of what is moved.
fn scaled(counts: Option<Vec<usize>>, scale: usize) -> Option<Vec<usize>> {
    counts.map(|counts| counts.into_iter().map(|count| count.saturating_mul(scale)).collect())
}

fn compression_of(py: Python<'_>, name: Option<&str>, kind: Kind) -> PyResult<Compression> {
    let Some(name) = name else { return Ok(Compression::None) };
    let compression: Compression = name.parse().map_err(|error: String| errors::invalid(py, error))?;
    if compression != Compression::None && kind != Kind::Number(DType::F32) {
        return Err(errors::unsupported(py, format!("{name} compresses f32, not {}", kind.name())));
    }
    Ok(compression)
}

/// Puts a result where the caller wants it.
fn deliver<T: Element>(mut output: ForeignBuffer<T>) -> impl FnOnce(Vec<T>) -> Result<Outcome, Error> + Send {
    move |result| {
        let output = output.as_mut();
        if output.len() != result.len() {
            return Err(Error::InvalidCounts("the output's length is not the result's"));
        }
        output.copy_from_slice(&result);
        Ok(Outcome::Nothing)
    }
}

#[expect(clippy::unnecessary_wraps, reason = "what operations are finished with may fail")]
fn over<R>(_: R) -> Result<Outcome, Error> {
    Ok(Outcome::Nothing)
}

#[pymethods]
impl Group {
    #[pyo3(signature = (output, op = "sum", input = None, compression = None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        op: &str,
        input: Option<Any<'_, '_>>,
        compression: Option<&str>,
    ) -> PyResult<()> {
        let (mut output, input) = place(output, input)?;
        let compression = compression_of(py, compression, output.kind)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        if compression != Compression::None {
            return self.turn(py, move |group| {
                output.copy_from(input.as_ref());
                group.all_reduce_compressed(output.elements_mut::<f32>(), op, compression)
            });
        }
        with_type!(dtype, T => self.turn(py, move |group| {
            output.copy_from(input.as_ref());
            group.all_reduce(output.elements_mut::<T>(), op)
        }))
    }

    #[pyo3(signature = (output, op = "sum", input = None, compression = None))]
    fn all_reduce_async(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        op: &str,
        input: Option<Any<'_, '_>>,
        compression: Option<&str>,
    ) -> PyResult<Handle> {
        let (mut output, input) = place(output, input)?;
        let compression = compression_of(py, compression, output.kind)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        if compression != Compression::None {
            let given = input.as_ref().unwrap_or(&output).elements::<f32>().to_vec();
            let output = output.into_foreign::<f32>(py)?;
            return self.begun(py, move |group| {
                Ok(group.all_reduce_compressed_async(given, op, compression)?.and_then(deliver(output)))
            });
        }
        output.copy_from(input.as_ref());
        with_type!(dtype, T => {
            let output = output.into_foreign::<T>(py)?;
            self.begun(py, move |group| Ok(group.all_reduce_async(output, op)?.and_then(over)))
        })
    }

    #[pyo3(signature = (output, op, root, input = None))]
    fn reduce(
        &self,
        py: Python<'_>,
        output: Option<Any<'_, '_>>,
        op: &str,
        root: i64,
        input: Option<Any<'_, '_>>,
    ) -> PyResult<()> {
        let root = Self::rank(py, root)?;
        if let Some(input) = input.filter(|_| self.rank != root) {
            let input = Region::of(input)?;
            let (dtype, op) = reduced(py, input.kind, op)?;
            return with_type!(dtype, T => {
                let elements = input.elements::<T>();
                self.turn(py, move |group| group.reduce_from(elements, op, root).map(|_| ()))
            });
        }
        let output = output.ok_or_else(|| errors::invalid(py, "there is nothing to put the result in"))?;
        let (mut output, input) = place(output, input)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        with_type!(dtype, T => self.turn(py, move |group| {
            output.copy_from(input.as_ref());
            group.reduce(output.elements_mut::<T>(), op, root)
        }))
    }

    #[pyo3(signature = (output, op, root, input = None))]
    fn reduce_async(
        &self,
        py: Python<'_>,
        output: Option<Any<'_, '_>>,
        op: &str,
        root: i64,
        input: Option<Any<'_, '_>>,
    ) -> PyResult<Handle> {
        let root = Self::rank(py, root)?;
        if let Some(input) = input.filter(|_| self.rank != root) {
            let input = Region::of(input)?;
            let (dtype, op) = reduced(py, input.kind, op)?;
            return with_type!(dtype, T => {
                let elements = input.elements::<T>();
                self.begun(py, move |group| Ok(group.reduce_from_async(elements, op, root)?.and_then(over)))
            });
        }
        let output = output.ok_or_else(|| errors::invalid(py, "there is nothing to put the result in"))?;
        let (mut output, input) = place(output, input)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        output.copy_from(input.as_ref());
        with_type!(dtype, T => {
            let output = output.into_foreign::<T>(py)?;
            self.begun(py, move |group| Ok(group.reduce_async(output, op, root)?.and_then(over)))
        })
    }

    #[pyo3(signature = (output, input, op = "sum", counts = None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Any<'_, '_>,
        op: &str,
        counts: Option<Vec<usize>>,
    ) -> PyResult<()> {
        let (mut output, input) = (Region::writable(output)?, Region::of(input)?);
        alike(py, &output, &input)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        with_type!(dtype, T => {
            let (output, input) = (output.elements_mut::<T>(), input.elements::<T>());
            self.turn(py, move |group| match counts {
                Some(counts) => group.reduce_scatter_uneven_into(input, output, &counts, op),
                None => group.reduce_scatter_into(input, output, op),
            })
        })
    }

    #[pyo3(signature = (output, input, op = "sum", counts = None))]
    fn reduce_scatter_async(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Any<'_, '_>,
        op: &str,
        counts: Option<Vec<usize>>,
    ) -> PyResult<Handle> {
        let (output, input) = (Region::writable(output)?, Region::of(input)?);
        alike(py, &output, &input)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        with_type!(dtype, T => {
            let (output, input) = (output.into_foreign::<T>(py)?, input.elements::<T>());
            self.begun(py, move |group| {
                let begun = match counts {
                    Some(counts) => group.reduce_scatter_uneven_async(input, &counts, op)?,
                    None => group.reduce_scatter_from_async(input, op)?,
                };
                Ok(begun.and_then(deliver(output)))
            })
        })
    }

    #[pyo3(signature = (output, input, counts = None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Option<Any<'_, '_>>,
        counts: Option<Vec<usize>>,
    ) -> PyResult<()> {
        let mut output = Region::writable(output)?;
        let (dtype, scale) = output.kind.moved();
        let counts = scaled(counts, scale);
        let input = input.map(Region::of).transpose()?;
        if let Some(input) = &input {
            alike(py, &output, input)?;
        }
        with_type!(dtype, T => {
            let output = output.elements_mut::<T>();
            let input = input.as_ref().map(Region::elements::<T>);
            self.turn(py, move |group| match (input, counts) {
                (Some(input), Some(counts)) => group.all_gather_uneven_into(input, output, &counts),
                (Some(input), None) => group.all_gather_into(input, output),
                (None, None) => group.all_gather(output),
                (None, Some(counts)) => {
                    let own = own_part(group, output, &counts)?;
                    group.all_gather_uneven_into(&own, output, &counts)
                }
            })
        })
    }

    #[pyo3(signature = (output, input, counts = None))]
    fn all_gather_async(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Option<Any<'_, '_>>,
        counts: Option<Vec<usize>>,
    ) -> PyResult<Handle> {
        let mut output = Region::writable(output)?;
        let (dtype, scale) = output.kind.moved();
        let counts = scaled(counts, scale);
        let input = input.map(Region::of).transpose()?;
        if let Some(input) = &input {
            alike(py, &output, input)?;
            let n = self.size as usize;
            if counts.is_none() && output.count == n * input.count {
                // In place, once this rank's part is there.
                output.copy_part(self.rank.index() * input.bytes(), input);
            } else if counts.is_none() {
                let (output, input) = (output.count, input.count);
                let what = format!("the output has {output} elements and not {n} times the input's {input}");
                return Err(errors::invalid(py, what));
            }
        }
        with_type!(dtype, T => {
            let own = input.as_ref().map(Region::elements::<T>);
            let mut output = output.into_foreign::<T>(py)?;
            self.begun(py, move |group| {
                let Some(counts) = counts else { return Ok(group.all_gather_async(output)?.and_then(over)) };
                let copied = match own {
                    Some(_) => Vec::new(),
                    None => own_part(group, output.as_mut(), &counts)?,
                };
                let own = own.unwrap_or(&copied);
                Ok(group.all_gather_uneven_async(own, &counts)?.and_then(deliver(output)))
            })
        })
    }

    #[pyo3(signature = (output, input, root, counts = None))]
    fn gather(
        &self,
        py: Python<'_>,
        output: Option<Any<'_, '_>>,
        input: Any<'_, '_>,
        root: i64,
        counts: Option<Vec<usize>>,
    ) -> PyResult<()> {
        let (root, input) = (Self::rank(py, root)?, Region::of(input)?);
        let mut output = self.on_root(output, root)?.map(Region::writable).transpose()?;
        if let Some(output) = &output {
            alike(py, output, &input)?;
        }
        let (dtype, scale) = input.kind.moved();
        let counts = scaled(counts, scale);
        with_type!(dtype, T => {
            let output: &mut [T] = match &mut output {
                Some(output) => output.elements_mut::<T>(),
                None => &mut [],
            };
            let input = input.elements::<T>();
            self.turn(py, move |group| match counts {
                Some(counts) => group.gather_uneven_into(input, output, &counts, root),
                None => group.gather_into(input, output, root),
            })
        })
    }

    #[pyo3(signature = (output, input, root, counts = None))]
    fn gather_async(
        &self,
        py: Python<'_>,
        output: Option<Any<'_, '_>>,
        input: Any<'_, '_>,
        root: i64,
        counts: Option<Vec<usize>>,
    ) -> PyResult<Handle> {
        let (root, input) = (Self::rank(py, root)?, Region::of(input)?);
        let output = self.on_root(output, root)?.map(Region::writable).transpose()?;
        if let Some(output) = &output {
            alike(py, output, &input)?;
        }
        let (dtype, scale) = input.kind.moved();
        let counts = scaled(counts, scale);
        with_type!(dtype, T => {
            let output = output.map(|output| output.into_foreign::<T>(py)).transpose()?;
            let input = input.elements::<T>();
            self.begun(py, move |group| {
                let begun = match counts {
                    Some(counts) => group.gather_uneven_async(input, &counts, root)?,
                    None => group.gather_async(input, root)?,
                };
                Ok(match output {
                    Some(output) => begun.and_then(deliver(output)),
                    None => begun.and_then(over),
                })
            })
        })
    }

    #[pyo3(signature = (output, input, root, counts = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Option<Any<'_, '_>>,
        root: i64,
        counts: Option<Vec<usize>>,
    ) -> PyResult<()> {
        let (root, mut output) = (Self::rank(py, root)?, Region::writable(output)?);
        let input = self.on_root(input, root)?.map(Region::of).transpose()?;
        if let Some(input) = &input {
            alike(py, &output, input)?;
        }
        let (dtype, scale) = output.kind.moved();
        let counts = scaled(counts, scale);
        with_type!(dtype, T => {
            let output = output.elements_mut::<T>();
            let input = input.as_ref().map_or(&[][..], Region::elements::<T>);
            let count = output.len() * self.size as usize;
            self.turn(py, move |group| match counts {
                Some(counts) => group.scatter_uneven_into(input, output, &counts, root),
                None => group.scatter_into(input, output, count, root),
            })
        })
    }

    #[pyo3(signature = (output, input, root, counts = None))]
    fn scatter_async(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Option<Any<'_, '_>>,
        root: i64,
        counts: Option<Vec<usize>>,
    ) -> PyResult<Handle> {
        let (root, output) = (Self::rank(py, root)?, Region::writable(output)?);
        let input = self.on_root(input, root)?.map(Region::of).transpose()?;
        if let Some(input) = &input {
            alike(py, &output, input)?;
        }
        let (dtype, scale) = output.kind.moved();
        let counts = scaled(counts, scale);
        let count = output.moved_count() * self.size as usize;
        with_type!(dtype, T => {
            let output = output.into_foreign::<T>(py)?;
            let input = input.as_ref().map_or(&[][..], Region::elements::<T>);
            self.begun(py, move |group| {
                let begun = match counts {
                    Some(counts) => group.scatter_uneven_async(input, &counts, root)?,
                    None => group.scatter_async(input, count, root)?,
                };
                Ok(begun.and_then(deliver(output)))
            })
        })
    }

    fn broadcast(&self, py: Python<'_>, output: Any<'_, '_>, root: i64) -> PyResult<()> {
        let root = Self::rank(py, root)?;
        let mut output = self.to_broadcast(output, root)?;
        with_type!(output.kind.moved().0, T => {
            let output = output.elements_to_broadcast::<T>();
            self.turn(py, move |group| group.broadcast(output, root))
        })
    }

    fn broadcast_async(&self, py: Python<'_>, output: Any<'_, '_>, root: i64) -> PyResult<Handle> {
        let root = Self::rank(py, root)?;
        let output = self.to_broadcast(output, root)?;
        with_type!(output.kind.moved().0, T => {
            let output = output.into_foreign::<T>(py)?;
            self.begun(py, move |group| Ok(group.broadcast_async(output, root)?.and_then(over)))
        })
    }

    #[pyo3(signature = (output, input, send_counts = None, receive_counts = None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Any<'_, '_>,
        send_counts: Option<Vec<usize>>,
        receive_counts: Option<Vec<usize>>,
    ) -> PyResult<()> {
        let (mut output, input) = (Region::writable(output)?, Region::of(input)?);
        alike(py, &output, &input)?;
        let (dtype, scale) = output.kind.moved();
        let counts = both(py, scaled(send_counts, scale), scaled(receive_counts, scale))?;
        with_type!(dtype, T => {
            let (output, input) = (output.elements_mut::<T>(), input.elements::<T>());
            self.turn(py, move |group| match counts {
                Some((sent, received)) => group.all_to_all_uneven_into(input, output, &sent, &received),
                None => group.all_to_all_into(input, output),
            })
        })
    }

    #[pyo3(signature = (output, input, send_counts = None, receive_counts = None))]
    fn all_to_all_async(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        input: Any<'_, '_>,
        send_counts: Option<Vec<usize>>,
        receive_counts: Option<Vec<usize>>,
    ) -> PyResult<Handle> {
        let (output, input) = (Region::writable(output)?, Region::of(input)?);
        alike(py, &output, &input)?;
        let (dtype, scale) = output.kind.moved();
        let counts = both(py, scaled(send_counts, scale), scaled(receive_counts, scale))?;
        with_type!(dtype, T => {
            let (output, input) = (output.into_foreign::<T>(py)?, input.elements::<T>());
            self.begun(py, move |group| {
                let begun = match counts {
                    Some((sent, received)) => group.all_to_all_uneven_async(input, &sent, &received)?,
                    None => group.all_to_all_async(input)?,
                };
                Ok(begun.and_then(deliver(output)))
            })
        })
    }

    #[pyo3(signature = (output, op = "sum", input = None))]
    fn scan(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        op: &str,
        input: Option<Any<'_, '_>>,
    ) -> PyResult<()> {
        let (mut output, input) = place(output, input)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        with_type!(dtype, T => self.turn(py, move |group| {
            output.copy_from(input.as_ref());
            group.scan(output.elements_mut::<T>(), op)
        }))
    }

    #[pyo3(signature = (output, op = "sum", input = None))]
    fn scan_async(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        op: &str,
        input: Option<Any<'_, '_>>,
    ) -> PyResult<Handle> {
        let (mut output, input) = place(output, input)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        output.copy_from(input.as_ref());
        with_type!(dtype, T => {
            let output = output.into_foreign::<T>(py)?;
            self.begun(py, move |group| Ok(group.scan_async(output, op)?.and_then(over)))
        })
    }

    #[pyo3(signature = (output, op = "sum", input = None))]
    fn exscan(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        op: &str,
        input: Option<Any<'_, '_>>,
    ) -> PyResult<()> {
        let (mut output, input) = place(output, input)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        with_type!(dtype, T => {
            let given = input.as_ref().unwrap_or(&output).elements::<T>().to_vec();
            let output = output.elements_mut::<T>();
            self.turn(py, move |group| {
                if let Some(result) = group.exscan(&given, op)? {
                    output.copy_from_slice(&result);
                }
                Ok(())
            })
        })
    }

    #[pyo3(signature = (output, op = "sum", input = None))]
    fn exscan_async(
        &self,
        py: Python<'_>,
        output: Any<'_, '_>,
        op: &str,
        input: Option<Any<'_, '_>>,
    ) -> PyResult<Handle> {
        let (output, input) = place(output, input)?;
        let (dtype, op) = reduced(py, output.kind, op)?;
        with_type!(dtype, T => {
            let given = input.as_ref().unwrap_or(&output).elements::<T>().to_vec();
            let output = output.into_foreign::<T>(py)?;
            self.begun(py, move |group| {
                let deliver = deliver(output);
                let finish = |result: Option<Vec<T>>| result.map_or(Ok(Outcome::Nothing), deliver);
                Ok(group.exscan_async(&given, op)?.and_then(finish))
            })
        })
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.turn(py, ringtrain::Group::barrier)
    }

    fn barrier_async(&self, py: Python<'_>) -> PyResult<Handle> {
        self.begun(py, |group| Ok(group.barrier_async()?.and_then(over)))
    }
}

impl Group {
    /// Begins an operation.
    fn begun(
        &self,
        py: Python<'_>,
        begin: impl FnOnce(&mut ringtrain::Group) -> Result<ringtrain::Handle<Outcome>, Error> + Send,
    ) -> PyResult<Handle> {
        self.turn(py, begin).map(Handle::new)
    }

    /// A buffer that the root alone has.
    fn on_root<'a, 'py>(
        &self,
        buffer: Option<Any<'a, 'py>>,
        root: ringtrain::Rank,
    ) -> PyResult<Option<Any<'a, 'py>>> {
        match buffer {
            Some(buffer) if self.rank == root => Ok(Some(buffer)),
            None if self.rank == root => {
                Python::attach(|py| Err(errors::invalid(py, "the root needs both buffers")))
            }
            _ => Ok(None),
        }
    }

    /// What is broadcast, which the root only reads.
    fn to_broadcast(&self, output: Any<'_, '_>, root: ringtrain::Rank) -> PyResult<Region> {
        if self.rank == root { Region::of(output) } else { Region::writable(output) }
    }
}

/// A copy of this rank's part, which stands in its place among all parts.
fn own_part<T: Element>(group: &ringtrain::Group, all: &[T], counts: &[usize]) -> Result<Vec<T>, Error> {
    let refused = Error::InvalidCounts("they do not fit the buffer");
    let rank = group.rank().index();
    let own = counts.get(rank).copied().unwrap_or_default();
    let before = counts.iter().take(rank).fold(0, |sum: usize, &count| sum.saturating_add(count));
    all.get(before..before.saturating_add(own)).map(<[T]>::to_vec).ok_or(refused)
}

/// Both counts, or neither.
fn both(
    py: Python<'_>,
    sent: Option<Vec<usize>>,
    received: Option<Vec<usize>>,
) -> PyResult<Option<(Vec<usize>, Vec<usize>)>> {
    match (sent, received) {
        (Some(sent), Some(received)) => Ok(Some((sent, received))),
        (None, None) => Ok(None),
        _ => Err(errors::invalid(py, "uneven parts need both send_counts and receive_counts")),
    }
}
